"""What the recorder costs for each frame: on the camera's thread, and on its own two.

    python benchmarks/recorder.py [--size 1280x720] [--frames 200]

Frames of a drawn road with noise and four lanes of 56 points go through a recorder whose threads
are not started: each step is timed by itself, as processor time of its thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from support.live_cameras.clip import road

from edge_server.board.board import Identity
from edge_server.cameras.frame import Frame
from edge_server.cameras.jpeg import encode_jpeg
from edge_server.lanes.types import Lane, LaneFrame
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.recorder.recorder import Recorder
from edge_server.pipeline.recorder.recording_writer import RecordingFiles
from edge_server.pixels import Image
from edge_server.settings import RecorderSection


def measure(size: str, frames: int, directory: Path, *, jpeg: bool) -> str:
    width, height = map(int, size.split("x"))
    identity = Identity("bench", "1", "0" * 8, "bench")
    files = RecordingFiles(directory, identity.boot_id, most_bytes=2 << 30, reserve_bytes=0)
    section = RecorderSection(mode="continuous")
    recorder = Recorder(section, files, identity, EventLog(), lambda _: None)
    pictures = [Image.of_bgr(each) for each in road(width, height, pictures=4)]
    data = [encode_jpeg(each, 85) for each in pictures]
    xs = np.linspace(0, 1, 56, dtype=np.float32)
    points = np.stack([width * xs, height * (1 - xs / 2)], 1)
    lanes = tuple(Lane(points + 10 * i, 0.9) for i in range(4))
    times: dict[str, list[int]] = {"camera": [], "encoder": [], "writer": []}
    for number in range(frames):
        now = time.monotonic_ns()
        frame = Frame(
            number,
            pictures[number % 4],
            now,
            time.time_ns(),
            jpeg=data[number % 4] if jpeg else None,
        )
        lane_frame = LaneFrame(
            "front", number, 0, now, time.time_ns(), width, height, "m", lanes=lanes
        )
        steps = (
            ("camera", lambda lf=lane_frame, f=frame: recorder(lf, f)),
            ("encoder", lambda: recorder.encode(0.0)),
            ("writer", recorder.write),
        )
        for name, step in steps:
            began = time.thread_time_ns()
            step()
            times[name].append(time.thread_time_ns() - began)
    recorder.end()
    (path,) = directory.glob("*.mcap")
    shown = ", ".join(f"{name} {median(each) / 1e6:.3f} ms" for name, each in times.items())
    kind = "the camera's JPEGs" if jpeg else "pixels"
    return f"{size}, {kind}: {shown}; {path.stat().st_size / frames / 1e3:.0f} kB a frame"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--frames", type=int, default=200)
    arguments = parser.parse_args()
    for jpeg in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(arguments.size, arguments.frames, Path(folder), jpeg=jpeg))


if __name__ == "__main__":
    main()
