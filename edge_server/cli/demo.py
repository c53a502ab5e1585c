"""`edge-server demo`: runs the whole appliance on one road and shows its messages."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import sys
import tempfile
import time
from collections import defaultdict, deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from edge_server.board.board import Identity
from edge_server.board.installation import missing, shipped_models
from edge_server.cameras.calibration import CalibrationTables, LensTable, MountingTable, text_of
from edge_server.cameras.source import is_live
from edge_server.cameras.source_uri import masked_uri, parse_source_uri
from edge_server.cli.tables import REFRESH_S, LaneTable, result_text
from edge_server.daemon.daemon import VERSION, Daemon
from edge_server.errors import SettingsError, SourceError, Unavailable
from edge_server.mqtt.broker import address_of
from edge_server.mqtt.clients import try_broker
from edge_server.pipeline import messages
from edge_server.pipeline.perception import NetworkFrame, marks_of
from edge_server.process.logs import set_up_logging
from edge_server.settings import LogSection, Settings, read_settings

if TYPE_CHECKING:
    import argparse
    import threading
    from collections.abc import Mapping, Sequence

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.lane_pipeline import Listener
    from edge_server.pipeline.networks import NetworkListener
    from edge_server.settings import Mqtt

DEVICE = "demo"
PICTURE = Path("lanes.png")
# Limit of messages waiting to be shown, some seconds of them.
KEPT = 256

_TIMEOUT_S = 15.0


def run_demo(
    arguments: argparse.Namespace, stop: threading.Event, broker: Mapping[str, Any] | None
) -> None:
    """Start a daemon with one camera, show its messages, write a picture.

    Returns when as many messages as wanted arrived, the source ended or `stop` was set; with a port
    for the page at `stop` alone.

    Args:
        arguments: a plain path as the source is played again and again, once in lock-step.
        stop: ends the demo, also while it starts.
        broker: `host` and `port` to publish to, beside the messages that are shown.
    """
    source, as_json, page_port = arguments.source, arguments.json, arguments.serve
    video: Path | None = arguments.video
    log_switches = set_up_logging(LogSection(info=False))
    output = sys.stderr if as_json else sys.stdout
    inbox = Inbox()
    newest: deque[tuple[LaneFrame, Frame]] = deque(maxlen=1)
    with ExitStack() as running:
        settings = _settings(
            _played(source, arguments),
            broker,
            arguments,
            page_port or 0,
            arguments.calibration or _calibration_file(source, running),
        )
        if page_port is not None:
            _require_free(page_port)
        show = _messages_to(inbox)
        listeners: list[Listener] = [_keep_in(newest), show]
        network_listeners: list[NetworkListener] = [lambda found: show(found, None)]
        if video is not None:
            _require_other_file(video, settings.cameras["road"].uri)
            of_lanes, of_networks = _into_video(video, running, output)
            listeners.append(of_lanes)
            network_listeners.append(of_networks)
        daemon = Daemon(settings, listeners, log_switches, network_listeners=network_listeners)
        if settings.mqtt is not None and not stop.is_set():
            _require_broker(settings.mqtt)
        daemon.start(stop)
        running.callback(daemon.stop)
        if not stop.is_set():
            print(_heading(source, daemon, settings), file=output, flush=True)
            try:
                _show(inbox, stop, arguments)
            finally:
                inbox.over = True
            if page_port is not None:
                stop.wait()
    if newest:
        _leave_picture(*newest[0], output)


def _require_free(port: int) -> None:
    """Raises: Unavailable: another process has the page's port. The daemon's own text, which has
    the flags of `run`, is for whoever takes it after this."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise Unavailable(
            f"the page cannot listen on 127.0.0.1:{port}: {os.strerror(error.errno or 0)}; choose "
            "another port with --serve PORT"
        ) from error


def _require_broker(mqtt: Mqtt) -> None:
    """Raises: Unavailable: it does not take a connection; the daemon would wait for it."""
    if fault := try_broker(mqtt, f"{DEVICE}-test").fault:
        raise Unavailable(
            f"MQTT broker {address_of(mqtt)} cannot be reached: {fault}; start one there, or leave "
            "--mqtt out"
        )


class Inbox(queue.Queue[bytes]):
    """Queue of messages to show: `KEPT` at most, then the oldest is dropped.

    Attributes:
        over: nobody reads any more.
    """

    def __init__(self) -> None:
        super().__init__(KEPT)
        self.over = False

    def add(self, payload: bytes, *, lockstep: bool = False) -> None:
        """Add a message; never waits, however slow the reader is, but in lock-step."""
        while lockstep and not self.over:
            with suppress(queue.Full):
                self.put(payload, timeout=REFRESH_S)
                return
        if self.full():
            with suppress(queue.Empty):
                self.get_nowait()
        with suppress(queue.Full):  # another thread has added one meanwhile
            self.put_nowait(payload)


def _settings(
    source: str,
    broker: Mapping[str, Any] | None,
    arguments: argparse.Namespace,
    page_port: int,
    calibration: Path | str | None,
) -> Settings:
    networks: Sequence[str] = arguments.network or ()
    repositories: Sequence[Path] = arguments.model_repository or (shipped_models(),)
    examples = shipped_models().parent / "examples" / "networks"  # where this is a checkout
    if networks and not arguments.model_repository and examples.is_dir():
        repositories = (*repositories, examples)
    chosen: dict[str, Any] = {
        "device": {"id": DEVICE},
        "repository": {"paths": list(map(str, repositories))},
        "grpc": {"port": 0},
        "metrics": {"enabled": False},
        "http": {"port": page_port},
        "cameras": {"road": {"uri": source, "networks": {n: {"model": n} for n in networks}}},
    }
    if broker is not None:
        chosen["mqtt"] = dict(broker)
    if calibration is not None:
        chosen["cameras"]["road"]["calibration"] = str(calibration)
    return read_settings(None, chosen)


def _played(source: str, arguments: argparse.Namespace) -> str:
    """Return the URI that plays `source`: a recording in lock-step where that is asked for, or a
    video is written of it."""
    lockstep = arguments.lockstep or arguments.video is not None
    if "://" in source and not lockstep:
        return source
    if is_live(source):
        if arguments.lockstep:
            raise SettingsError(
                f"--lockstep: {masked_uri(source)} is a camera, which does not wait; play a "
                "recording"
            )
        return source
    if "://" not in source:
        loop = str(not lockstep).lower()
        source = f"file://{quote(str(Path(source).absolute()))}?loop={loop}"
    fps = parse_source_uri(source).query.get("fps")
    if fps is None and lockstep:
        return f"{source}{'&' if '?' in source else '?'}fps=0"
    if arguments.lockstep and fps != "0":
        raise SettingsError(
            f"--lockstep: {masked_uri(source)} has a rate, fps={fps}; leave one out"
        )
    return source


def _calibration_file(source: str, running: ExitStack) -> str | None:
    """Return a file with the calibration of the camera of a drawn road, which ends with `running`;
    None for other sources, whose cameras only their owners know."""
    if not source.startswith("synthetic:"):
        return None
    try:
        # OpenCV takes long to import.
        from edge_server.tools.road.scene import RoadScene
        from edge_server.tools.road.variants import VARIANTS, varied
    except ModuleNotFoundError:
        return None  # the camera names what is missing
    uri = parse_source_uri(source)
    seed = uri.whole("seed", 0, 0, 2**32 - 1)
    # One of the conditions is another camera; the camera names those that there are not.
    conditions = [name for name in uri.query.get("conditions", "").split(",") if name in VARIANTS]
    camera = varied(RoadScene.for_camera(seed), conditions, seed).camera
    width, height = (
        uri.whole(name, default, 64, 4096) for name, default in (("width", 1280), ("height", 720))
    )
    # The camera is shifted, not tilted: its optical axis is level.
    lens = LensTable(
        kind="pinhole",
        width=width,
        height=height,
        fx=camera.focal * width,
        fy=camera.focal * width,
        cx=width / 2 - 0.5,
        cy=camera.horizon * height - 0.5,
        distortion=(0.0,) * 5,
    )
    folder = running.enter_context(tempfile.TemporaryDirectory(prefix="edge-server-demo-"))
    file = Path(folder, "calibration.toml")
    mounting = MountingTable(height_m=camera.height_m)
    file.write_text(text_of(CalibrationTables(lens, mounting)), encoding="utf-8")
    return str(file)


def _keep_in(newest: deque[tuple[LaneFrame, Frame]]) -> Listener:
    def keep(lane_frame: LaneFrame, frame: Frame | None) -> None:
        if frame is not None:
            newest.append((lane_frame, frame))

    return keep


def _require_other_file(video: Path, uri: str) -> None:
    """Raises: SettingsError: `video` is the clip that is played, and would take its place."""
    with suppress(OSError, ValueError):  # there is no such video yet, or the source is no file
        if video.samefile(parse_source_uri(uri).path):
            raise SettingsError(f"--video: {video} is the source itself; choose another name")


def _into_video(path: Path, running: ExitStack, output: Any) -> tuple[Listener, NetworkListener]:
    """Return listeners that write a video, which is complete at the end of `running`."""
    try:
        # OpenCV takes long to import.
        from edge_server.cameras.lane_video import LaneVideo
    except ModuleNotFoundError as error:
        raise SettingsError(f"--video: {missing(error)}") from error
    video = LaneVideo(path)

    def close(_kind: object, ends_with: BaseException | None, _trace: object) -> None:
        try:
            video.close()
        except SourceError as error:
            if ends_with is None:
                raise
            # The demo's own error says why.
            print(f"edge-server: warning: {error}", file=sys.stderr, flush=True)
            return
        missed = f", {video.missed} left out for want of time" if video.missed else ""
        print(f"{video.frames} frames are in {path.absolute()}{missed}", file=output, flush=True)

    def mark(found: NetworkFrame) -> None:
        video.mark(found.network, found.capture_mono_ns, marks_of(found))

    running.push(close)
    return video, mark


def _messages_to(inbox: Inbox) -> Listener:
    """Return a listener that makes the messages which a broker would get."""
    identity = Identity.of_this_host(DEVICE, VERSION)
    counters: dict[str, itertools.count[int]] = defaultdict(itertools.count)  # by network

    def add(lane_frame: LaneFrame, _: Frame | None) -> None:
        counter = counters[lane_frame.network if isinstance(lane_frame, NetworkFrame) else ""]
        now_ns = time.monotonic_ns()
        message = messages.frame_payload(lane_frame, identity, next(counter), now_ns)
        inbox.add(message, lockstep=lane_frame.clock == "recording")

    return add


def _heading(source: str, daemon: Daemon, settings: Settings) -> str:
    mqtt = settings.mqtt
    broker = "no MQTT broker" if mqtt is None else f"MQTT on {mqtt.host}:{mqtt.port}"
    shown, port = masked_uri(source), daemon.grpc_port
    page = f"http://127.0.0.1:{daemon.http_port}/"
    return f"edge-server {VERSION}: {shown}; gRPC on 127.0.0.1:{port}; {broker}; page: {page}"


def _show(inbox: Inbox, stop: threading.Event, arguments: argparse.Namespace) -> None:
    source, frames, keep = arguments.source, arguments.frames, arguments.serve is not None
    table = None if arguments.json else LaneTable()
    arrived = 0
    reason = ""
    give_up = time.monotonic() + _TIMEOUT_S
    while not stop.is_set() and (not frames or arrived < frames):
        # A camera that has been there may come back: the table shows what is wrong meanwhile.
        if time.monotonic() > give_up and not (keep or (arrived and is_live(source))):
            raise Unavailable(no_lanes_text(masked_uri(source), reason))
        try:
            payload = inbox.get(timeout=REFRESH_S)
        except queue.Empty:
            continue
        message = msgspec.json.decode(payload)
        if "network" in message:
            print(payload.decode() if table is None else result_text(message), flush=True)
            continue
        # An old frame is what a failed camera has; the last reason is the camera's or the model's.
        reason = "".join(message["reasons"][-1:])
        is_valid = message["status"] != "FRAME_STATUS_INVALID"
        if is_valid:
            give_up = time.monotonic() + _TIMEOUT_S
            arrived += 1
        if table is not None:
            table.add(message)
        elif is_valid or not frames:  # N frames are N lines
            print(payload.decode(), flush=True)
        if [each["code"] for each in message["reason_details"][-1:]] == ["REASON_CODE_ENDED"]:
            break
    if table is not None:
        table.finish()


def no_lanes_text(shown: str, reason: str) -> str:
    """Return why the demo ends without lanes; `shown` is the source's name, once."""
    named = "" if shown in reason else f" from {shown}"
    return f"no lanes arrived for {_TIMEOUT_S:g} s{named}" + (f": {reason}" if reason else "")


def _leave_picture(lane_frame: LaneFrame, frame: Frame, output: Any) -> None:
    # Imported here: where OpenCV is missing, the camera has already raised a clear error.
    from edge_server.cameras.colour import bgr_of, resized
    from edge_server.cameras.lane_video import draw_lane_frame
    from edge_server.cameras.recordings import write_picture

    picture = free_name(PICTURE)
    try:
        whole = resized(bgr_of(frame.image), *frame.size)
        write_picture(picture, draw_lane_frame(whole, lane_frame))
    except SourceError as error:
        print(f"edge-server: warning: {error}", file=sys.stderr, flush=True)
        return
    print(f"the last frame with its lanes is in {picture.absolute()}", file=output, flush=True)


def free_name(path: Path) -> Path:
    """Return `path`, or if it exists a free name like `lanes-2.png`."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))
