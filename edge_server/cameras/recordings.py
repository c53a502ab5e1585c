"""Videos and folders of images as sources of frames, and pictures that are written."""

from __future__ import annotations

import io
import logging
import os
from contextlib import closing
from typing import TYPE_CHECKING

import cv2
import numpy as np

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.frame import (
    FASTEST_FPS,
    IMAGE_SUFFIXES,
    LARGEST_VIDEO_PX,
    SLOWEST_FPS,
    PictureTooLarge,
    Recording,
    check_size,
)
from edge_server.cameras.jpeg import PNG, size_of_jpeg, size_of_png
from edge_server.cameras.opencv_settings import MOST_TRACKS, no_camera_opens, settle_opencv
from edge_server.cameras.source import open_source
from edge_server.errors import SourceError
from edge_server.process.disk import open_regular

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from numpy.typing import NDArray

log = logging.getLogger(__name__)

FOLDER_FPS = 10.0
# The rate of a video that does not state its own.
VIDEO_FPS = 25.0
# Larger files are no image of a camera, and could fill the memory.
_LARGEST_IMAGE_BYTES = 2**28
# A camera takes 4 s to open, or not to.
_TURN_S = 5.0


def open_images(path: Path, *, fps: float | None, loop: bool) -> Recording:
    """Play the images of a folder in the order of their names, or one image.

    An image that cannot be decoded completely is skipped, and logged once, however often the folder
    loops.

    Args:
        path: a folder, or one image, which is played as a folder of one.
        fps: `FOLDER_FPS` if None; 0 is lock-step with steps of `FOLDER_FPS`, see `Pace`.
        loop: restart at the end.

    Raises:
        SourceError: the folder has no image that can be decoded.
    """
    return Recording(_folder(path, loop), fps or FOLDER_FPS, lockstep=fps == 0)


def open_video(path: Path, *, fps: float | None, loop: bool) -> Recording:
    """Play a video at its own frame rate.

    A file that breaks off in the middle ends there. Each round of a loop reopens the file, so a
    replaced file is played in its new form.

    Args:
        path: a regular file.
        fps: the video's own if None; 0 is lock-step with steps of that, see `Pace`.
        loop: see `open_images`.

    Raises:
        SourceError: no image can be decoded from the file.
    """
    with no_camera_opens(_TURN_S):
        capture, first = _open_capture(path)
    images = _video(path, capture, first, loop)
    return Recording(images, fps or _own_fps(path, capture), lockstep=fps == 0)


def _folder(path: Path, loop: bool) -> Generator[NDArray[np.uint8], None, None]:
    images = _images_of(path)
    while True:
        for each in tuple(images):
            image = _decode_or_skip(each)
            if image is None:
                images.remove(each)
            else:
                yield image
        if not images:
            raise SourceError(
                f"{path}: none of its images can be read; they are damaged or no JPEG or PNG"
            )
        if not loop:
            return


def _video(
    path: Path, capture: cv2.VideoCapture, first: NDArray[np.uint8], loop: bool
) -> Generator[NDArray[np.uint8], None, None]:
    expected = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    image: NDArray[np.uint8] | None = first
    played = 0
    try:
        while image is not None:
            yield image
            played += 1
            image = capture.read()[1]
            if image is None and played + 1 < expected:  # containers may count one too many
                log.warning("video %s: broke off after %d of %d frames", path, played, expected)
                expected = 0
            if image is None and loop:
                capture.release()
                capture, image = _open_capture(path)
    finally:
        capture.release()


def _own_fps(path: Path, capture: cv2.VideoCapture) -> float:
    fps = float(capture.get(cv2.CAP_PROP_FPS))
    if SLOWEST_FPS <= fps <= FASTEST_FPS:
        return fps
    log.warning("video %s: has no usable frame rate, playing %g fps", path, VIDEO_FPS)
    return VIDEO_FPS


def _open_capture(path: Path) -> tuple[cv2.VideoCapture, NDArray[np.uint8]]:
    """Return the opened file and its first image."""
    settle_opencv()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        # OpenCV's bindings would read from a null pointer.
        raise SourceError(f"{path}: the name is not UTF-8; rename it") from None
    try:
        os.close(open_regular(path))
    except OSError as error:
        raise SourceError(f"{path}: cannot be played: {error.strerror}") from error
    # OpenCV's other readers unpack a picture of any size.
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    image = None
    if capture.isOpened():
        try:
            check_size(
                int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)),
                int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)),
                LARGEST_VIDEO_PX,
            )
        except PictureTooLarge as error:
            capture.release()
            raise SourceError(f"{path}: {error}") from None
        image = capture.read()[1]
    if image is None:
        capture.release()
        raise SourceError(
            f"{path}: no video can be read from this file; it is damaged, incomplete, of an "
            f"unknown format, or has more than {MOST_TRACKS} tracks: play it elsewhere, or convert "
            "it to MP4 (H.264)"
        )
    return capture, image


def _images_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    images = sorted(
        entry
        for entry in path.iterdir()
        if entry.suffix.lower() in IMAGE_SUFFIXES and entry.is_file()
    )
    if not images:
        wanted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise SourceError(f"{path}: has no images in it; put {wanted} files there")
    return images


def _decode_or_skip(path: Path) -> NDArray[np.uint8] | None:
    try:
        return _decode_whole(path)
    except (OSError, ValueError) as error:
        log.warning("image %s: skipped: %s", path, error)
        return None


def _decode_whole(path: Path) -> NDArray[np.uint8]:
    """Decode one image; raise for an incomplete file, which OpenCV would decode half grey.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, incomplete, too large or no image.
    """
    with io.FileIO(open_regular(path)) as file:
        data = file.read(_LARGEST_IMAGE_BYTES + 1)
    if len(data) > _LARGEST_IMAGE_BYTES:
        raise ValueError(f"it is larger than {_LARGEST_IMAGE_BYTES >> 20} MiB")
    # OpenCV would take any other format by its first bytes, whatever the file's name.
    judge = size_of_png if data.startswith(PNG) else size_of_jpeg
    judge(data)
    try:
        buffer = np.frombuffer(data, np.uint8)
        image: NDArray[np.uint8] | None = cv2.imdecode(buffer, cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise ValueError(error.err) from error
    if image is None:
        raise ValueError("it is damaged or no image")
    return image


def read_picture(uri: str) -> NDArray[np.uint8]:
    """Return the first frame of `uri`, (H, W, 3) uint8 BGR.

    Raises:
        SourceError: it gives no frame; see `open_source`.
    """
    with closing(open_source(uri)) as source:
        frame = source.read()
    if frame is None:
        raise SourceError(f"{uri}: has no frame")
    return bgr_of(frame.image)


def write_picture(path: Path, image: NDArray[np.uint8]) -> None:
    """Write `image`, (H, W, 3) uint8 BGR, in the format of `path`'s suffix.

    Raises:
        SourceError: the image cannot be encoded in that format, or not be written to `path`.
    """
    try:
        encoded, data = cv2.imencode(path.suffix, image)
    except cv2.error:
        encoded = False
    if not encoded:
        raise SourceError(
            f"{path}: cannot be encoded: {image.shape} image, format {path.suffix!r}; "
            "use .png or .jpg"
        )
    try:
        path.write_bytes(data.tobytes())
    except OSError as error:
        raise SourceError(f"{path}: cannot be written: {error.strerror}") from error
