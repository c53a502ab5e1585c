"""How fast a camera's faults are seen, and how fast lanes return, for each fault and reader.

    python benchmarks/camera_faults.py [--fault NAME]... [--reader gstreamer|opencv] [--repeats N]

A camera (an RTSP server on loopback) feeds the whole daemon, and a subscriber of a real broker
notes when messages arrive. `seen` is from the fault to the first message that names it, of lanes or
of the camera's state; `back` is from the moment at which the camera is as before to the first
lanes. Each is the median and the longest of the repeats; `inf` is longer than the limit.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from appliance import LiveDaemon, readers
from record import add_option, record
from support.live_cameras.clip import Clip, write_road
from support.live_cameras.network import TcpProxy
from support.live_cameras.rtsp import RtspCamera, Stream, what_is_missing

if TYPE_CHECKING:
    from collections.abc import Callable

# Longer than the longest delay before a camera is opened again, after which delays start anew.
STEADY_S = 6.0
LIMIT_S = 15.0
STATUS, LANES = "/cameras/front/status", "/cameras/front/lanes"


@dataclass(frozen=True)
class Scene:
    """What stands between the camera's sensor and the daemon."""

    camera: RtspCamera
    proxy: TcpProxy
    clip: Clip
    other: Clip


@dataclass(frozen=True)
class Fault:
    """One fault and its end.

    Attributes:
        begin, end: cause and undo it; one that ends at once has no `end`.
        words: the states or reasons of a status that names it; empty where a fault is no fault.
        goal_s: `seen` and `back`, in seconds.
    """

    begin: Callable[[Scene], object]
    end: Callable[[Scene], object] | None
    words: tuple[str, ...]
    goal_s: tuple[float, float]


def command(words: str) -> Callable[[Scene], object]:
    return lambda scene: scene.camera.command(words)


def kill(scene: Scene) -> None:
    scene.proxy.shut()
    scene.camera.kill()


def start_again(scene: Scene) -> None:
    scene.camera.start()
    scene.proxy.open()


PLAY = command("play")
FAULTS = {
    "killed": Fault(kill, start_again, ("lost",), (0.5, 1.0)),
    "cut": Fault(lambda s: s.proxy.cut(), None, ("lost",), (0.5, 1.0)),
    "stalled": Fault(
        lambda s: s.proxy.stall(), lambda s: s.proxy.flow(), ("stalled", "lost"), (1.0, 1.0)
    ),
    "hung": Fault(
        lambda s: s.camera.hang(), lambda s: s.camera.go_on(), ("stalled", "lost"), (1.0, 1.0)
    ),
    "no pictures": Fault(command("silence"), PLAY, ("stalled", "lost"), (1.0, 1.0)),
    "frozen": Fault(command("freeze"), PLAY, ("frozen",), (2.0, 1.0)),
    "black": Fault(command("black"), PLAY, ("black",), (2.0, 1.0)),
    "covered": Fault(command("grey"), PLAY, ("covered", "black"), (2.0, 1.0)),
    "white": Fault(command("white"), PLAY, ("white_out",), (2.0, 1.0)),
    "other size": Fault(lambda s: s.camera.show(s.other), None, (), (2.0, 1.0)),
}


@dataclass(frozen=True)
class Result:
    """What one repeat gave; infinite where it was not seen within the limit."""

    seen_s: float
    back_s: float
    words: frozenset[str]


def repeat(running: LiveDaemon, scene: Scene, fault: Fault, lasts_s: float) -> Result:
    """Cause the fault once, undo it, and wait until the camera has been well for a while."""
    expected = scene.clip if fault.words else scene.other

    def names_it(message: dict[str, Any]) -> bool:
        if "lanes" in message and "status" in message:
            first = (message["reasons"] or [""])[0].partition(":")[0]
            return message["status"] == "FRAME_STATUS_INVALID" and first in fault.words
        return message["state"] in fault.words or message["reason"] in fault.words

    def has_lanes(message: dict[str, Any]) -> bool:
        whole = message["image"] == {"width": expected.width, "height": expected.height}
        return whole and message["status"] != "FRAME_STATUS_INVALID"

    since = len(running.subscriber.in_order)
    began_ns = time.monotonic_ns()
    fault.begin(scene)
    seen_ns = (
        running.wait(began_ns, (STATUS, LANES), names_it, LIMIT_S) if fault.words else began_ns
    )
    ended_ns = began_ns
    if fault.end is not None:
        time.sleep(max(0.0, lasts_s - (time.monotonic_ns() - began_ns) / 1e9))
        fault.end(scene)
        ended_ns = time.monotonic_ns()
    back_ns = running.wait(max(ended_ns, seen_ns or 0), LANES, has_lanes, LIMIT_S)
    words = frozenset(m["reason"] or m["state"] for _, m in running.messages(since, STATUS))
    if not fault.words:
        scene.camera.show(scene.clip)
    time.sleep(STEADY_S)
    return Result(
        _seconds(began_ns, seen_ns),
        _seconds(ended_ns, back_ns),
        words - {"ok"},
    )


def _seconds(since_ns: int, until_ns: int | None) -> float:
    return math.inf if until_ns is None else (until_ns - since_ns) / 1e9


def measure(reader: str, names: list[str], arguments: argparse.Namespace) -> dict[str, float]:
    """Print a line for each fault, and return its medians."""
    found = {}
    stream = Stream(codec=arguments.codec, fps=arguments.fps)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clip, other = write_road(folder, 640, 360), write_road(folder, 480, 272)
        camera = stack.enter_context(RtspCamera(clip, stream))
        proxy = stack.enter_context(TcpProxy(camera.port))
        scene = Scene(camera, proxy, clip, other)
        front = {"uri": camera.uri(proxy.port), "reader": reader}
        running = stack.enter_context(LiveDaemon({"front": front}))
        running.wait(0, LANES, lambda m: m["status"] == "FRAME_STATUS_OK", LIMIT_S)
        time.sleep(STEADY_S)
        for name in names:
            fault = FAULTS[name]
            got = [
                repeat(running, scene, fault, arguments.lasts_s) for _ in range(arguments.repeats)
            ]
            seen, back = [r.seen_s for r in got], [r.back_s for r in got]
            words = frozenset[str]().union(*(r.words for r in got))
            good = max(seen) <= fault.goal_s[0] and max(back) <= fault.goal_s[1]
            print(
                f"{reader:10} {name:12} {median(seen):6.2f} {max(seen):6.2f} {fault.goal_s[0]:5g}"
                f" {median(back):7.2f} {max(back):6.2f} {fault.goal_s[1]:5g}"
                f"  {'yes' if good else 'NO':4} {', '.join(sorted(words))}",
                flush=True,
            )
            found[f"{reader} {name} seen s"] = median(seen)
            found[f"{reader} {name} back s"] = median(back)
        running.check()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reader", action="append", choices=["gstreamer", "opencv"])
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lasts-s", type=float, default=4.0, help="from a fault until its end")
    parser.add_argument("--codec", default="h264", choices=["h264", "h265", "jpeg"])
    parser.add_argument("--fps", type=float, default=15.0)
    add_option(parser)
    arguments = parser.parse_args()
    if missing := what_is_missing():
        sys.exit(missing)
    print(
        f"{'':10} {'':12} {'seen':>6} {'most':>6} {'goal':>5} {'back':>7} {'most':>6} {'goal':>5}"
    )
    found = {}
    for reader in arguments.reader or readers():
        found |= measure(reader, arguments.fault or list(FAULTS), arguments)
    record(arguments.record, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
