"""How well a reader keeps up with JPEGs over HTTP: frames per second and processor time.

    python benchmarks/camera_mjpeg.py [--size 3840x2160] [--fps 30] [--seconds 8] [--cameras 1]

Cameras in a process of their own serve noisy road pictures over loopback. Each is read as the
daemon reads it, for a model whose network takes 640 x 360. `CPU` is the reading process's time in
percent of one processor, for each camera; `age` is from the arrival to the hand-over of the newest
frame, `behind` from the sending of its JPEG.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from itertools import cycle
from statistics import median

import cv2
import numpy as np
from appliance import readers
from record import add_option, record
from support.live_cameras.clip import road
from support.live_cameras.mjpeg import MjpegCamera

from edge_server.cameras.camera import Camera
from edge_server.cameras.source_uri import SourceOptions

# A sensor's noise costs most of a JPEG's bits.
_NOISE_STD = 8.0
_PICTURES = 4
NETWORK = (640, 360)


def serve(size: str, fps: float, quality: int) -> None:
    """Serve until standard input ends; print the port."""
    width, height = map(int, size.split("x"))
    noise = np.random.default_rng(1)
    pictures = []
    for image in road(width, height, pictures=_PICTURES):
        grain = cv2.GaussianBlur(
            noise.normal(0, _NOISE_STD, image.shape).astype(np.float32), (0, 0), 1
        )
        noisy = np.clip(image + 3 * grain, 0, 255).astype(np.uint8)
        pictures.append(
            cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
        )
    with MjpegCamera(partial(next, cycle(pictures)), fps=fps) as camera:
        print(camera.port, sum(map(len, pictures)) // len(pictures), flush=True)
        sys.stdin.read()


def measure(uris: list[str], reader: str, seconds: float) -> dict[str, float]:
    """Print a line, and return the frames a second, the share of a core and the age."""
    options = SourceOptions(reader=reader)
    cameras = [Camera(f"camera{n}", uri, options=options) for n, uri in enumerate(uris)]
    for camera in cameras:
        camera.useful.size = NETWORK
        camera.open(10.0)
        camera.start()
    time.sleep(2.0)
    before = [camera.captured for camera in cameras]
    cpu_s, began = time.process_time(), time.monotonic()
    ages, shape = [], ""
    while time.monotonic() < began + seconds:
        frame = cameras[0].next_frame(0.5)
        if frame is not None:
            ages.append((time.monotonic_ns() - frame.capture_mono_ns) / 1e6)
            shape = f"{frame.image.width}x{frame.image.height} {frame.image.pixel_format.value}"
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
    got = [c.captured - b for c, b in zip(cameras, before, strict=True)]
    for camera in cameras:
        camera.stop()
    fps = [each / wall_s for each in got]
    core, age_ms = cpu_s / wall_s / len(cameras), median(ages or [0])
    print(
        f"{reader:10} {len(cameras)} {min(fps):6.1f} {max(fps):6.1f} fps"
        f" {core:6.1%} CPU, age {age_ms:6.1f} ms, {shape}",
        flush=True,
    )
    return {f"{reader} per s": min(fps), f"{reader} core": core, f"{reader} age ms": age_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="3840x2160")
    parser.add_argument("--fps", type=float, default=30.0)
    parser.add_argument("--quality", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--cameras", type=int, default=1)
    parser.add_argument("--reader", action="append", choices=["gstreamer", "opencv"])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.size, arguments.fps, arguments.quality)
        return
    command = [sys.executable, __file__, "--serve", "--size", arguments.size]
    command += ["--fps", str(arguments.fps), "--quality", str(arguments.quality)]
    found: dict[str, float] = {}
    for reader in arguments.reader or readers():
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            port, nbytes = server.stdout.readline().split()
            print(f"{arguments.size}, {int(nbytes) / 1e6:.2f} MB a picture: ", end="")
            uris = [f"http://127.0.0.1:{port}/camera.mjpeg"] * arguments.cameras
            try:
                found |= measure(uris, reader, arguments.seconds)
            finally:
                server.communicate()
    record(arguments.record, found)


if __name__ == "__main__":
    main()
