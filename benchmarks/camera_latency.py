"""Where a live frame's time goes, from the camera's sensor to the MQTT message, by reader.

    python benchmarks/camera_latency.py [--codec h264] [--size 640x360] [--fps 15] [--seconds S]

A camera (an RTSP server on loopback) writes the time into the pixels of each picture before it
encodes it, so every figure is from the pixels themselves, whatever the frame's capture time claims:

- encode: in the camera, the encoder alone.
- send: from there until the picture's last RTP packet passes a proxy.
- reader: from there until the reader's `read` returns: jitter buffer, decoder, conversion.
- wait: until the model takes the frame; preprocess, infer, postprocess: as the message says.
- publish: until the message is written; broker: until a subscriber on this machine has it.

`reader` is measured with the reader alone, the rest with the whole daemon; all are medians, and the
sum of medians is not the median of the sum. `claimed` is what the capture time makes of the age
that the pixels show: 0 is right, and positive looks younger than it is.
"""

from __future__ import annotations

import argparse
import bisect
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from appliance import LiveDaemon, readers, shown_ns
from record import add_option, record
from support.live_cameras.clip import write_road
from support.live_cameras.network import TcpProxy
from support.live_cameras.rtsp import RtspCamera, Stream, what_is_missing

from edge_server.cameras.source import open_source
from edge_server.cameras.source_uri import SourceOptions

if TYPE_CHECKING:
    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame

WARM_UP_S = 4.0


class MarkerClock(TcpProxy):
    """Notes when the last RTP packet of each picture passes.

    Attributes:
        marked_ns: CLOCK_MONOTONIC of each, in order.
    """

    def __init__(self, target_port: int) -> None:
        self.marked_ns: list[int] = []
        self._rest = b""
        super().__init__(target_port)

    def _passed_on(self, data: bytes, to_camera: bool) -> bytes:
        if not to_camera:
            self._look(data)
        return data

    def _look(self, data: bytes) -> None:
        """RTSP, 10.12: `$`, the channel, a length in two bytes, a packet; or a response's text."""
        rest = self._rest + data
        while len(rest) >= 6:
            if rest[0] != 0x24:
                head, end, body = rest.partition(b"\r\n\r\n")
                if not end:
                    break
                sizes = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
                rest = body[int(sizes[0].partition(b":")[2]) if sizes else 0 :]
                continue
            length = 4 + int.from_bytes(rest[2:4], "big")
            if len(rest) < length:
                break
            if rest[1] == 0 and rest[5] & 0x80:
                self.marked_ns.append(time.monotonic_ns())
            rest = rest[length:]
        self._rest = rest


def reader_alone(uri: str, clock: MarkerClock, reader: str, seconds: float) -> dict[str, float]:
    """Read as fast as frames come: medians of `send` with the encoder, and of `reader`, in ms."""
    source = open_source(uri, options=SourceOptions(reader=reader))
    wire, read = [], []
    cpu_s, frames = 0.0, 0
    try:
        begin = time.monotonic()
        measuring = False
        while (now := time.monotonic()) < begin + WARM_UP_S + seconds:
            if not measuring and now > begin + WARM_UP_S:
                measuring, cpu_s, frames = True, time.process_time(), 0
            frame = source.read()
            returned_ns = time.monotonic_ns()
            assert frame is not None
            frames += 1
            at_ns = shown_ns(frame)
            if not measuring or at_ns is None:
                continue
            at = bisect.bisect(clock.marked_ns, at_ns)
            if at < len(clock.marked_ns):
                wire.append((clock.marked_ns[at] - at_ns) / 1e6)
                read.append((returned_ns - clock.marked_ns[at]) / 1e6)
        cpu_ms = 1e3 * (time.process_time() - cpu_s) / max(1, frames)
    finally:
        source.close()
    return {"wire": float(np.median(wire)), "reader": float(np.median(read)), "cpu": cpu_ms}


def whole_daemon(uri: str, reader: str, seconds: float) -> dict[str, np.ndarray]:
    """Return each stage's ms, of all frames whose message arrived."""
    shown: dict[int, int] = {}

    def note(_lane_frame: LaneFrame, frame: Frame) -> None:
        at_ns = shown_ns(frame)
        if at_ns is not None:
            shown[frame.id] = at_ns

    with LiveDaemon({"front": {"uri": uri, "reader": reader}}, (note,)) as running:
        time.sleep(WARM_UP_S)
        since = len(running.subscriber.in_order)
        time.sleep(seconds)
        running.check()
        messages = running.messages(since, "/cameras/front/lanes")
    rows = []
    for arrived_ns, message in messages:
        at_ns = shown.get(message["frame_id"])
        if at_ns is None:
            continue
        spent = message["latency_us"]
        capture_ns = int(message["time"]["capture_mono_ns"])
        published_ns = capture_ns + message["time"]["age_us"] * 1000
        begun_ns = capture_ns + spent["queue"] * 1000
        stages = [spent[name] / 1e3 for name in ("preprocess", "infer", "postprocess")]
        rows.append(
            [
                (begun_ns - at_ns) / 1e6,
                *stages,
                (published_ns - begun_ns) / 1e6 - sum(stages),
                (arrived_ns - published_ns) / 1e6,
                (arrived_ns - at_ns) / 1e6,
                (capture_ns - at_ns) / 1e6,
            ]
        )
    names = ("until model", "preprocess", "infer", "postprocess", "publish", "broker", "total")
    return dict(zip((*names, "claimed"), np.array(rows).T, strict=True))


def measure(reader: str, arguments: argparse.Namespace) -> dict[str, float]:
    width, height = map(int, arguments.size.split("x"))
    stream = Stream(codec=arguments.codec, fps=arguments.fps, stamp=True, kbit_s=arguments.kbit_s)
    with tempfile.TemporaryDirectory() as folder:
        clip = write_road(Path(folder), width, height)
        with RtspCamera(clip, stream) as camera:
            with MarkerClock(camera.port) as clock:
                alone = reader_alone(camera.uri(clock.port), clock, reader, arguments.seconds)
                encode_ms = float(camera.command("encode_ms"))
            stages = whole_daemon(camera.uri(), reader, arguments.seconds)
    medians = {name: float(np.median(values)) for name, values in stages.items()}
    total = stages["total"]
    rows = {
        "encode": encode_ms,
        "send": alone["wire"] - encode_ms,
        "reader": alone["reader"],
        "wait": medians["until model"] - alone["wire"] - alone["reader"],
        **{
            name: medians[name]
            for name in ("preprocess", "infer", "postprocess", "publish", "broker")
        },
        "total": medians["total"],
        "total p95": float(np.percentile(total, 95)),
        "total p99": float(np.percentile(total, 99)),
        "claimed": medians["claimed"],
        "CPU of reading": alone["cpu"],
    }
    print(
        f"\n{reader}, {arguments.codec} {arguments.size} at {arguments.fps:g} Hz, "
        f"{len(total)} frames"
    )
    for name, value in rows.items():
        print(f"  {name:16}{value:8.1f} ms")
    sys.stdout.flush()
    return {f"{reader} {name} ms": value for name, value in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reader", action="append", choices=["gstreamer", "opencv"])
    parser.add_argument("--codec", default="h264", choices=["h264", "h265", "jpeg"])
    parser.add_argument("--size", default="640x360")
    parser.add_argument("--fps", type=float, default=15.0)
    parser.add_argument("--kbit-s", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=15.0)
    add_option(parser)
    arguments = parser.parse_args()
    if missing := what_is_missing():
        sys.exit(missing)
    found: dict[str, float] = {}
    for reader in arguments.reader or readers():
        found |= measure(reader, arguments)
    record(arguments.record, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
