"""What the camera's health says of pictures that are well, and how fast it finds faults.

    python benchmarks/camera_health.py [--clips FOLDER] [--seconds 30] [--json]

Plays scenes made of the road clips (MP4) in a folder at 25 frames/s of simulated time: as they are,
by night, through a tunnel, parked, braking, with a lorry passing a parked vehicle; then faults that
begin in the middle of a scene. H.264 scenes pass x264 and a decoder of GStreamer (gst-launch-1.0);
they are left out where it is missing. Exit code 1 if a good scene was frozen or covered, or a fault
was missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from edge_server.cameras.inspection import PictureHealth
from edge_server.pixels import Colour, ColourRange, Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from numpy.typing import NDArray

    Pictures: TypeAlias = "Iterator[NDArray[np.uint8]]"

CLIPS = Path(__file__).parents[2] / "shared" / "data" / "lanes" / "clips"
FPS = 25
SIZE = 960, 540
MUST_NOT = {"frozen", "covered", "black", "white_out"}
X264 = (
    "x264enc key-int-max={key} pass=quant quantizer={quantizer} speed-preset=veryfast "
    "tune=zerolatency"
)
RNG = np.random.default_rng(5)


def noisy(picture: NDArray[np.uint8], sigma: float) -> NDArray[np.uint8]:
    noise = RNG.normal(0, sigma, picture.shape).astype(np.float32)
    return np.clip(np.rint(picture + noise), 0, 255).astype(np.uint8)


def scaled(picture: NDArray[np.uint8], share: float, sigma: float = 1.0) -> NDArray[np.uint8]:
    """The picture with less light, and the sensor's noise."""
    return noisy((picture * np.float32(share)).astype(np.uint8), sigma)


def clip(path: Path) -> list[NDArray[np.uint8]]:
    """The luma of a clip's frames, which runs back and forth without a cut."""
    capture = cv2.VideoCapture(str(path))
    pictures = []
    while True:
        got, frame = capture.read()
        if not got:
            break
        pictures.append(cv2.resize(cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY), SIZE))
    return pictures + pictures[-2:0:-1]


def h264(pictures: Pictures, *, key: int = 60, quantizer: int = 23) -> Pictures:
    """The pictures after an encoder and a decoder."""
    width, height = SIZE
    encoder = X264.format(key=key, quantizer=quantizer)
    raw = f"rawvideoparse format=gray8 width={width} height={height} framerate={FPS}/1"
    with tempfile.TemporaryDirectory() as folder:
        source, sink = Path(folder, "raw"), Path(folder, "decoded")
        with source.open("wb") as file:
            for picture in pictures:
                file.write(picture.tobytes())
        pipeline = (
            f"filesrc location={source} ! {raw} ! videoconvert ! video/x-raw,format=I420 ! "
            f"{encoder} ! h264parse ! avdec_h264 ! videoconvert ! video/x-raw,format=GRAY8 ! "
            f"filesink location={sink}"
        )
        subprocess.run(["gst-launch-1.0", "-q", *pipeline.split()], check=True)
        with sink.open("rb") as file:
            while len(data := file.read(width * height)) == width * height:
                yield np.frombuffer(data, np.uint8).reshape(height, width)


def driving(still: NDArray[np.uint8], speeds: Iterator[float]) -> Pictures:
    """A drive into a still picture: it grows around its vanishing point, and shakes a little."""
    width, height = SIZE
    scale = 1.0
    for speed in speeds:
        scale *= 1 + speed / 250
        if scale > 1.6:
            scale = 1.0
        x, y = RNG.normal(0, 0.5 * min(1.0, speed), 2)
        matrix = np.array(
            [[scale, 0, (1 - scale) * width / 2 + x], [0, scale, (1 - scale) * height / 2 + y]]
        )
        yield cv2.warpAffine(still, matrix, SIZE, borderMode=cv2.BORDER_REFLECT)


def braking(still: NDArray[np.uint8], deceleration: float, seconds: float) -> Pictures:
    """8 m/s, from half of the time on braking in m/s^2, then parked with noise."""
    frames = int(seconds * FPS)
    after_s = np.maximum(0, np.arange(frames) / FPS - seconds / 2)
    speeds = np.maximum(0, 8 - deceleration * after_s)
    return (noisy(picture, 1.5) for picture in driving(still, iter(speeds)))


def lorry(still: NDArray[np.uint8], other: NDArray[np.uint8], seconds: float) -> Pictures:
    """Parked; every 4 s a long vehicle fills the picture for 1.5 s, in 0.16 s from side to side."""
    width = SIZE[0]
    side = np.hstack([other] * 12)
    for number in range(int(seconds * FPS)):
        picture = still.copy()
        phase = (number % (4 * FPS)) / FPS
        if phase < 1.82:
            front = int(width * phase / 0.16)
            begin, end = max(0, int(front - width * 1.5 / 0.16)), min(width, front)
            if end > begin:
                at = (number * 37) % (side.shape[1] - width)
                picture[:, begin:end] = side[:, at : at + end - begin]
        yield noisy(picture, 1.5)


def covered(
    picture: NDArray[np.uint8], level: int, rows: slice, columns: slice
) -> NDArray[np.uint8]:
    """The picture behind a plain cover with a gradient."""
    covering = picture.copy()
    part = covering[rows, columns]
    part[:] = level + np.linspace(-4, 4, part.shape[1]).astype(np.int8)
    return noisy(covering, 1.5)


def with_clock(picture: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    shown = picture.copy()
    cv2.putText(shown, f"12:{number // 60:02}:{number % 60:02}", (20, 40), 0, 1, 255, 2)
    return shown


class Scene:
    """Pictures, what may not be found in them, and what must be found from a frame on."""

    def __init__(
        self,
        pictures: Callable[[], Pictures],
        *,
        fault: str = "",
        begins: int = 0,
        raw: bool = False,
    ) -> None:
        self.pictures = pictures
        self.fault = fault
        self.begins = begins
        self.raw = raw


def scenes_of(name: str, pictures: list[NDArray[np.uint8]], seconds: float) -> dict[str, Scene]:
    frames = int(seconds * FPS)
    half = frames // 2
    still, width, height = pictures[0], *SIZE
    every = slice(None)
    lower, left = (slice(height // 2, None), every), (every, slice(width // 2))

    def play() -> Pictures:
        return islice(cycle(pictures), frames)

    def then(change: Callable[[NDArray[np.uint8], int], NDArray[np.uint8]]) -> Pictures:
        for number, picture in enumerate(play()):
            yield picture if number < half else change(picture, number)

    def tunnel() -> Pictures:
        for number, picture in enumerate(play()):
            inside = np.clip(min(number - frames // 4, 3 * frames // 4 - number) / FPS, 0, 1)
            yield scaled(picture, 1 - 0.8 * inside)

    def parked(sigma: float) -> Pictures:
        return (noisy(still, sigma) for _ in range(frames))

    def frozen(sigma: float, *, clock: bool = False) -> Pictures:
        for number, picture in enumerate(play()):
            shown = picture if number < half else pictures[half % len(pictures)]
            yield with_clock(noisy(shown, sigma) if sigma else shown, number if clock else 0)

    scenes = {
        "as it is": Scene(play),
        "night, 1/10 of the light": Scene(lambda: (scaled(each, 0.1, 2) for each in play())),
        "night, 1/4 of the light": Scene(lambda: (scaled(each, 0.25, 2) for each in play())),
        "tunnel": Scene(tunnel),
        "raw, parked, noise 0.7": Scene(lambda: parked(0.7), raw=True),
        "raw, parked, noise 4": Scene(lambda: parked(4.0), raw=True),
        "raw, braking, 3 m/s2": Scene(lambda: braking(still, 3, seconds), raw=True),
        "raw: frozen": Scene(lambda: frozen(0), fault="frozen", begins=half, raw=True),
        "black": Scene(lambda: then(lambda p, _: scaled(p, 0)), fault="black", begins=half),
        "blinded": Scene(
            lambda: then(lambda p, _: noisy(np.full_like(p, 250), 3)),
            fault="white_out",
            begins=half,
        ),
        "covered": Scene(
            lambda: then(lambda p, _: covered(p, 90, every, every)), fault="covered", begins=half
        ),
        "lower half covered": Scene(
            lambda: then(lambda p, _: covered(p, 40, *lower)), fault="covered", begins=half
        ),
        "left half covered": Scene(
            lambda: then(lambda p, _: covered(p, 110, *left)), fault="covered", begins=half
        ),
        "blurred": Scene(
            lambda: then(lambda p, _: cv2.GaussianBlur(p, (0, 0), 4)),
            fault="blurred" if half >= 21 * FPS else "",
            begins=half,
        ),
    }
    if shutil.which("gst-launch-1.0"):
        scenes |= {
            "H.264, as it is": Scene(lambda: h264(play())),
            "H.264, night, 1/10": Scene(lambda: h264(scaled(each, 0.1, 2) for each in play())),
            "H.264, tunnel": Scene(lambda: h264(tunnel())),
            "H.264, parked, noise 1": Scene(lambda: h264(parked(1))),
            "H.264, parked, noise 1, coarse": Scene(lambda: h264(parked(1), quantizer=34)),
            "H.264, parked, noise 0, one key frame": Scene(lambda: h264(parked(0), key=9999)),
            "H.264, braking, 3 m/s2": Scene(lambda: h264(braking(still, 3, seconds))),
            "H.264, braking, 9 m/s2": Scene(lambda: h264(braking(still, 9, seconds), quantizer=34)),
            "H.264, parked, lorries pass": Scene(
                lambda: h264(lorry(still, pictures[-1][:, ::-1], seconds), quantizer=30)
            ),
            "H.264: frozen": Scene(lambda: h264(frozen(0)), fault="frozen", begins=half),
            "H.264: frozen, noise and a clock": Scene(
                lambda: h264(frozen(1, clock=True)), fault="frozen", begins=half
            ),
        }
    return {f"{name}: {scene}": made for scene, made in scenes.items()}


def play_scene(scene: Scene) -> dict[str, Any]:
    """Return what was found: the faults with the frames they lasted, and the time to detection."""
    health = PictureHealth()
    found: dict[str, int] = {}
    detected_s: float | None = None
    frames, spent_s = 0, 0.0
    colour = Colour(range=ColourRange.FULL)
    for number, picture in enumerate(scene.pictures()):
        frames += 1
        image = Image.of_packed(PixelFormat.GREY, picture[..., np.newaxis], colour)
        begin = time.thread_time()
        fault = health.inspect(image, number / FPS, raw=scene.raw)
        spent_s += time.thread_time() - begin
        if fault is None:
            continue
        expected = number >= scene.begins and fault.code == scene.fault
        if expected and detected_s is None:
            detected_s = (number - scene.begins) / FPS
        if not expected:
            found[fault.code] = found.get(fault.code, 0) + 1
    wrong = bool(MUST_NOT & found.keys()) or (bool(scene.fault) and detected_s is None)
    return {
        "frames": frames,
        "fault": scene.fault,
        "detected_s": detected_s,
        "other": found,
        "ms": round(1e3 * spent_s / max(1, frames), 3),
        "wrong": wrong or not frames,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=Path, default=CLIPS)
    parser.add_argument("--seconds", type=float, default=50.0, help="length of each scene")
    parser.add_argument("--only", default="", help="scenes whose name has this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    paths = sorted(arguments.clips.glob("*.mp4"))
    if not paths:
        print(f"{arguments.clips}: has no clips (MP4); name a folder with --clips", file=sys.stderr)
        return 2
    results = {}
    for path in paths:
        pictures = clip(path)
        for name, scene in scenes_of(path.stem, pictures, arguments.seconds).items():
            if arguments.only not in name:
                continue
            results[name] = result = play_scene(scene)
            if not arguments.json:
                seconds = result["detected_s"]
                time_text = "" if seconds is None else f"{seconds:.2f}"
                other = ", ".join(f"{k} {v}" for k, v in result["other"].items())
                print(
                    f"{'!' if result['wrong'] else ' '} {name:58} {result['frames']:5} "
                    f"{result['fault']:9} {time_text:>6} {result['ms']:6} {other}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(results))
    return int(any(result["wrong"] for result in results.values()) or not results)


if __name__ == "__main__":
    sys.exit(main())
