"""What an open page costs the cameras: frame rates with and without one, in pairs.

    python benchmarks/page.py [--cameras 4] [--pairs 15] [--seconds 4] [--fps 30] [--browser]

Cameras deliver drawn roads of 1280 x 720 at `--fps`, more than the shipped lane model manages on
this machine's processors, so that whatever the page takes is missing there. In turn the page is
closed and open, `--seconds` each; the page's other side is a process that reads and acknowledges
at once, on the same processors, or with `--browser` a headless Chromium that also draws, which
elsewhere is another machine's work.

A figure is the median of the pairs' ratios, with quartiles: of frames with lanes a second, and of
such frames for each second of this process's processor time, which other programs on the machine
hardly disturb. Beside it: what the threads of the page took of that time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.api.http.page.routes import page_routes
from edge_server.api.http.page.state import PageSources, PictureWriter
from edge_server.api.http.server import HttpListener, HttpServer
from edge_server.api.http.sources import Sources
from edge_server.board.board import Identity
from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame, Pace
from edge_server.cameras.source import SourceKind
from edge_server.gpu.device import Devices
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.picture_feed import PictureFeed
from edge_server.process.allocator import keep_large_buffers
from edge_server.tools.road.renderer import synthetic_road

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from evaluate_lane_model import SHIPPED_MODELS, load_models
from record import add_option, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.cameras.source_uri import SourceOptions, SourceUri
    from edge_server.pixels import Image

WARM_UP_S = 3.0
SETTLE_S = 0.5


class DrawnCamera:
    """A FrameSource with frames that were drawn before, so that they cost nothing now."""

    corrupt = 0

    def __init__(self, uri: SourceUri, _options: SourceOptions) -> None:
        self._pace = Pace(uri.fps() or 30.0)
        road = synthetic_road(seed=uri.whole("seed", 0, 0, 1000), fps=0)
        drawn = [frame.image for _ in range(10) if (frame := road.read()) is not None]
        road.close()
        self._images: Iterator[Image] = cycle(drawn)

    def read(self) -> Frame:
        self._pace.wait()
        return Frame.arrived(0, next(self._images))

    def close(self) -> None:
        """Nothing to release."""


class LaneCount:
    """A listener that counts the frames that got lanes."""

    def __init__(self) -> None:
        self.frames = 0

    def __call__(self, lane_frame: LaneFrame, _: Frame | None) -> None:
        self.frames += not lane_frame.failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cameras", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--fps", type=float, default=30.0)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--reader", help=argparse.SUPPRESS)  # the page's other side
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.reader:
        read_pictures(arguments.reader)
        return 0

    keep_large_buffers()  # as the daemon does
    devices = Devices()
    data_plane = load_models(SHIPPED_MODELS, devices)
    identity = Identity.of_this_host("bench", "0")
    feed, count, latency = PictureFeed(PictureWriter(identity)), LaneCount(), LaneLatency()
    kinds = {"drawn": SourceKind(DrawnCamera, live=True)}
    shares = FairShares()
    pipelines = [
        LanePipeline(
            Camera(f"camera{n}", f"drawn://road?seed={n}&fps={arguments.fps}", kinds=kinds),
            data_plane,
            "lane_detection",
            [feed, count, latency],
            shares=shares,
            max_age_ms=1000,
        )
        for n in range(arguments.cameras)
    ]
    parts = Sources("0", lambda: data_plane.index(only_ready=False), pipelines, latency)
    sources = PageSources(identity, parts, feed, EventLog())
    server = HttpServer([HttpListener("http", "127.0.0.1", 0, lambda: page_routes(sources))])
    feed.worker.start()
    server.start()
    for pipeline in pipelines:
        pipeline.camera.start()
        pipeline.worker.start()
    time.sleep(WARM_UP_S)
    print(f"a call without a page: {call_without_page_ns(feed):.0f} ns")
    record(arguments.record, report(pairs(count, feed, server.port_of("http"), arguments)))
    for pipeline in pipelines:
        pipeline.worker.stop()
        pipeline.camera.stop()
    server.stop(1.0)
    feed.worker.stop()
    devices.close()
    return 0


def call_without_page_ns(feed: PictureFeed) -> float:
    """What the feed takes of each frame's time while no page is open."""
    lane_frame = LaneFrame("camera0", 0, 0, 1, 1, 1280, 720, "lane_detection")
    began = time.thread_time_ns()
    for _ in range(100_000):
        feed(lane_frame, None)
    return (time.thread_time_ns() - began) / 100_000


class Rates(NamedTuple):
    """What some seconds gave.

    Attributes:
        per_s: frames with lanes a second.
        per_cpu_s: for each second of this process's processor time.
        page: part of that time that the page's threads took.
    """

    per_s: float
    per_cpu_s: float
    page: float


def page_cpu_s() -> float:
    """The processor time of the threads that work for the page alone."""
    threads = (each for each in threading.enumerate() if each.name in {"pictures", "http"})
    clocks = [time.pthread_getcpuclockid(each.ident) for each in threads if each.ident]
    return sum(map(time.clock_gettime, clocks))


def pairs(
    count: LaneCount, feed: PictureFeed, port: int, arguments: argparse.Namespace
) -> list[tuple[Rates, Rates]]:
    """Return pairs of rates: the page closed, and open."""
    other_side = browser if arguments.browser else reader
    found = []

    def rate() -> Rates:
        time.sleep(SETTLE_S)
        before = np.array([count.frames, time.monotonic(), time.process_time(), page_cpu_s()])
        time.sleep(arguments.seconds)
        after = np.array([count.frames, time.monotonic(), time.process_time(), page_cpu_s()])
        frames, wall_s, cpu_s, page_s = after - before
        return Rates(frames / wall_s, frames / cpu_s, page_s / cpu_s)

    for number in range(arguments.pairs):

        def opened() -> Rates:
            with other_side(port, [f"camera{n}" for n in range(arguments.cameras)]):
                until(lambda: feed.viewers > 0)
                return rate()

        def closed() -> Rates:
            until(lambda: feed.viewers == 0)
            return rate()

        if number % 2:  # so that a drift of the machine favours neither
            with_page = opened()
            found.append((closed(), with_page))
        else:
            without = closed()
            found.append((without, opened()))
        for name, rates in zip(("closed", "open"), found[-1], strict=True):
            print(
                f"  {name:6} {rates.per_s:6.2f}/s {rates.per_cpu_s:6.2f} per CPU s, page "
                f"{100 * rates.page:.1f} %",
                flush=True,
            )
    return found


def until(condition: Callable[[], bool]) -> None:
    by = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < by
        time.sleep(0.05)


@contextmanager
def reader(port: int, cameras: list[str]) -> Iterator[None]:
    """A process that reads what a page would draw: one camera large, the others small."""
    look = json.dumps(
        {"look_at": {name: "small" if n else "large" for n, name in enumerate(cameras)}}
    )
    command = [sys.executable, __file__, "--reader", f"{port} {look}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.terminate()


def read_pictures(port_and_look: str) -> None:
    from websockets.sync.client import connect  # noqa: PLC0415 - of the other process alone

    port, _, look = port_and_look.partition(" ")
    with connect(f"ws://127.0.0.1:{port}/page/live", max_size=None, compression=None) as socket:
        socket.send(look)
        for message in socket:
            if isinstance(message, bytes):
                socket.send(b"\0")


@contextmanager
def browser(port: int, _: list[str]) -> Iterator[None]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - needed with --browser alone

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        yield
        chromium.close()


def report(found: list[tuple[Rates, Rates]]) -> dict[str, float]:
    """Print what an open page costs, and return it: open / closed, and the threads' shares."""
    closed, opened = np.moveaxis(np.array(found), 1, 0)
    values: dict[str, float] = {}
    for place, name in enumerate(("frames/s", "frames/CPU s")):
        low, middle, high = np.percentile(opened[:, place] / closed[:, place], (25, 50, 75))
        medians = np.median(closed[:, place]), np.median(opened[:, place])
        print(
            f"{name}: closed {medians[0]:.2f}, open {medians[1]:.2f}; open / closed "
            f"{middle:.3f} ({low:.3f} to {high:.3f})"
        )
        values |= {f"{name} p25": low, f"{name} p50": middle, f"{name} p75": high}
    shares = 100 * np.median(closed[:, 2]), 100 * np.median(opened[:, 2])
    print(f"the page's threads: {shares[0]:.2f} % of it closed, {shares[1]:.2f} % open")
    return values | {"closed percent": shares[0], "open percent": shares[1]}


if __name__ == "__main__":
    sys.exit(main())
