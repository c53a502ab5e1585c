"""A recording of the recorder as a camera: the same pictures at the pace of their captures."""

from __future__ import annotations

import logging
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cameras.frame import CATCH_UP_S, Frame, Pace
from edge_server.cameras.jpeg import JpegDecoder
from edge_server.cameras.mcap_file import PictureRecords, cameras_in
from edge_server.errors import SourceError
from edge_server.process.utf8 import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.frame import UsefulSize
    from edge_server.cameras.mcap_file import Picture
    from edge_server.cameras.source_uri import SourceUri
    from edge_server.pixels import Image

log = logging.getLogger(__name__)

# A recording whose pictures are damaged, so many one after another, has none that can be shown.
MOST_DAMAGED = 10
# A longer gap between two pictures is one of the recording, or a step of its clock.
_LONGEST_GAP_S = 5.0


def chosen_camera(uri: SourceUri) -> tuple[str, Calibration | None]:
    """Return the camera of a recording that `uri` plays, and its calibration.

    Raises:
        SourceError: the file cannot be read, has no such camera, or several and `uri` names none.
    """
    cameras = cameras_in(Path(uri.path))
    wanted = uri.query.get("camera")
    if wanted is None and len(cameras) == 1:
        (wanted,) = cameras
    if wanted not in cameras:
        what = "has several cameras" if wanted is None else f"has no camera {wanted!r}"
        raise SourceError(
            f"{uri.label}: {what}; write ?camera= and one of {', '.join(map(shown, cameras))}"
        )
    return wanted, cameras[wanted]


def open_mcap(uri: SourceUri, useful: UsefulSize | None) -> McapSource:
    """Return the source of a recording.

    Raises:
        SourceError: the recording cannot be read; see `chosen_camera`.
        SourceUriError: an option is wrong.
    """
    camera, _ = chosen_camera(uri)
    return McapSource(
        Path(uri.path),
        camera,
        JpegDecoder(uri.label, useful),
        fps=uri.fps(),
        speed=uri.speed(),
        loop=uri.flag("loop"),
    )


class McapSource:
    """Plays the pictures of one camera in their order; a FrameSource.

    At its own pace a picture is due as long after the one before as it was captured after it, and
    its capture time is the moment at which it is due: from frame to frame it moves by the same
    nanoseconds in every replay at the same speed, and at speed 1 as it did on the road. A replay
    that is late by more than `CATCH_UP_S` goes on from its present picture.

    Args:
        path: a file of the recorder; one that breaks off ends there, with a line in the log.
        camera: its name in the file.
        decoder: of its JPEGs.
        fps: frames per second instead of the pace of their captures; 0 plays at the reading speed.
        speed: how many times as fast as it was recorded.
        loop: restart at the end.
        clock: returns monotonic time in nanoseconds.
        sleep: blocks for the given seconds.

    Raises:
        SourceError: the file cannot be read, or has no picture that can be decoded among the first
            `MOST_DAMAGED`.
    """

    def __init__(
        self,
        path: Path,
        camera: str,
        decoder: JpegDecoder,
        *,
        fps: float | None = None,
        speed: float = 1.0,
        loop: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.corrupt = 0
        self._path = path
        self._camera = camera
        self._decoder = decoder
        self._speed = speed
        self._loop = loop
        self._clock = clock
        self._sleep = sleep
        self._pace = None if fps is None else Pace(fps)
        self._count = 0
        self._damage = ""  # that the log has, in whatever round
        self._due_ns: int | None = None  # of the newest picture
        self._last: Picture | None = None
        self._pictures: Iterator[Picture] = self._play()
        # It is decoded when it is read: the size that its model needs is not known before.
        first = self._next()
        if first is None:
            raise SourceError(f"{path}: has no picture of camera {camera} that can be decoded")
        self._pictures = chain((first[0],), self._pictures)

    def read(self) -> Frame | None:
        following = self._next()
        if following is None:
            return None
        picture, (image, size) = following
        mono_ns = self._wait(picture)
        size = picture.size or size
        self._count += 1
        return Frame(
            self._count - 1,
            image,
            mono_ns,
            time.time_ns() - (self._clock() - mono_ns),
            picture_size=None if size == (image.width, image.height) else size,
            jpeg=picture.jpeg,
        )

    def close(self) -> None:
        self._pictures = iter(())

    def _next(self) -> tuple[Picture, tuple[Image, tuple[int, int] | None]] | None:
        """Return the next picture that can be decoded, and what `JpegDecoder` makes of it."""
        damage = ""
        for _ in range(MOST_DAMAGED):
            picture = next(self._pictures, None)
            if picture is None:
                return None
            try:
                return picture, self._decoder.decode(picture.jpeg)
            except ValueError as error:
                damage = str(error)
                self.corrupt += 1
        raise SourceError(
            f"{self._path}: {MOST_DAMAGED} pictures of camera {self._camera} one after another are "
            f"damaged ({damage}); play another recording",
            reason="corrupt",
        )

    def _wait(self, picture: Picture) -> int:
        """Block until `picture` is due; return the capture time of its frame."""
        if self._pace is not None:
            self._pace.wait()
            return self._clock()
        before, self._last = self._last, picture
        now_ns = self._clock()
        gap_ns = 0 if before is None else _gap_ns(before, picture)
        due_ns = now_ns if self._due_ns is None else self._due_ns + round(gap_ns / self._speed)
        if now_ns - due_ns > CATCH_UP_S * 1e9:
            due_ns = now_ns
        while (left_ns := due_ns - now_ns) > 0:
            self._sleep(left_ns / 1e9)
            now_ns = self._clock()
        self._due_ns = due_ns
        return due_ns

    def _play(self) -> Iterator[Picture]:
        while True:
            pictures = PictureRecords(self._path, self._camera)
            count = 0
            try:
                for picture in pictures:
                    count += 1
                    yield picture
            except OSError as error:
                raise SourceError(f"{self._path}: cannot be read: {error.strerror}") from error
            before, self._damage = self._damage, pictures.records.damage
            if self._damage not in ("", before):
                log.warning(
                    "recording %s: broke off after %d pictures of camera %s: %s",
                    self._path,
                    count,
                    self._camera,
                    self._damage,
                )
            if not self._loop or not count:
                return


def _gap_ns(before: Picture, picture: Picture) -> int:
    """Return the time between the captures; 0 where that is none of a drive."""
    if before.mono_ns is not None and picture.mono_ns is not None:
        gap_ns = picture.mono_ns - before.mono_ns
    else:
        gap_ns = picture.epoch_ns - before.epoch_ns
    return gap_ns if 0 < gap_ns < _LONGEST_GAP_S * 1e9 else 0
