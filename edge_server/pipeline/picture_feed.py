"""PictureFeed: pictures of the cameras, made only while somebody looks at them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame

log = logging.getLogger(__name__)

# The part of all processors that pictures may take, so that the cameras keep their frame rates.
PROCESSOR_SHARE = 0.01
# What it takes to send a picture of 33 kB to one page and to read that it was shown; measured.
SENDING_S = 0.0002
_LOOK_S = 1.0


SizeName = Literal["full", "large", "small"]


class PictureSize(NamedTuple):
    """How pictures are sent: a wider one is made so small, in px; at most so many a second."""

    width: int
    max_hz: float


# One camera is looked at closely, in `full` on a whole screen or magnified; the others are seen
# beside it.
SIZES: Mapping[SizeName, PictureSize] = MappingProxyType(
    {
        "full": PictureSize(1920, 15.0),
        "large": PictureSize(960, 15.0),
        "small": PictureSize(320, 5.0),
    }
)


class Sight(NamedTuple):
    """A frame that is to become a picture.

    Attributes:
        seen_ns: `time.monotonic_ns()` when its lanes were known.
    """

    lane_frame: LaneFrame
    frame: Frame
    seen_ns: int


class PictureFeed:
    """A listener of the pipelines. Safe from any thread.

    Without viewers a call returns at its first line. With viewers it keeps a frame only where one
    of them waits for it; the newest frame of each camera wins. Pictures are made on a thread of
    their own, once for each frame and size, and are sent within `PROCESSOR_SHARE` of the
    processors: where that is too little, viewers get fewer pictures, down to one a second, and the
    cameras lose nothing.

    Args:
        encode: returns the picture of a frame that is no wider than so many px.
        processors: how many there are; by default those that this process may use.
        spent_s: what a picture takes is counted with it; on busy processors a picture takes longer
            by the clock, so fewer are made there.
    """

    def __init__(
        self,
        encode: Callable[[Sight, int], bytes],
        *,
        processors: int | None = None,
        now_s: Callable[[], float] = time.monotonic,
        spent_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = Worker("pictures", self.tick)
        self._encode = encode
        self._share = PROCESSOR_SHARE * (processors or len(os.sched_getaffinity(0)))
        self._now_s = now_s
        self._spent_s = spent_s
        self._changed = threading.Condition()
        self._viewers: tuple[Viewer, ...] = ()  # replaced, never changed
        self._waiting: dict[str, Sight] = {}  # by camera, the one that waits longest first
        self._rest_until_s = 0.0
        self._fault = ""

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        """Take a frame; a Listener."""
        if not self._viewers or frame is None:
            return
        camera, now_s = lane_frame.camera, self._now_s()
        with self._changed:
            if any(viewer.wants(camera, now_s) for viewer in self._viewers):
                # In its place in the order, so that a fast camera does not starve another.
                self._waiting[camera] = Sight(lane_frame, frame, time.monotonic_ns())
                self._changed.notify()

    def open(self, wake: Callable[[], object]) -> Viewer:
        """Return a new viewer, which looks at nothing yet; `close` must get it back.

        Args:
            wake: called on the encoder's thread when there is a picture to take; returns at once.
        """
        viewer = Viewer(wake)
        with self._changed:
            self._viewers = (*self._viewers, viewer)
        return viewer

    def close(self, viewer: Viewer) -> None:
        """Make no more pictures for `viewer`."""
        with self._changed:
            self._viewers = tuple(each for each in self._viewers if each is not viewer)
            if not self._viewers:
                self._waiting.clear()

    def stop(self) -> None:
        """Make no more pictures, at once; the one that is being made is waited for."""
        self.worker.ask_to_stop()
        with self._changed:
            self._changed.notify()
        self.worker.stop()

    @property
    def viewers(self) -> int:
        """Number of open viewers."""
        return len(self._viewers)

    def tick(self, now: float) -> None:
        """Make the pictures of one frame, or wait briefly for one; on the encoder's thread."""
        del now
        rest_s = self._rest_until_s - self._now_s()
        if rest_s > 0:
            self.worker.wait(min(rest_s, _LOOK_S))
            return
        with self._changed:
            with self.worker.allowing(math.inf):
                self._changed.wait_for(lambda: self._waiting or self.worker.stopping)
            if not self._waiting:
                return
            camera = next(iter(self._waiting))
            sight = self._waiting.pop(camera)
            now_s = self._now_s()
            looking = [viewer for viewer in self._viewers if viewer.wants(camera, now_s)]
        began_s = self._spent_s()
        given = self._give(sight, looking, now_s)
        spent_s = self._spent_s() - began_s + given * SENDING_S
        # On overloaded processors too a picture a second comes; the page calls older ones stale.
        self._rest_until_s = self._now_s() + min(spent_s / self._share, _LOOK_S)

    def _give(self, sight: Sight, looking: list[Viewer], now_s: float) -> int:
        """Return how many viewers have got a picture."""
        given = 0
        made: dict[SizeName, bytes] = {}
        camera = sight.lane_frame.camera
        for viewer in looking:
            size = viewer.size_of(camera)
            if size is None:  # it has just looked away
                continue
            if size not in made:
                try:
                    made[size] = self._encode(sight, SIZES[size].width)
                except Exception as error:
                    # A picture that cannot be made costs the viewers that picture alone.
                    if str(error) != self._fault:
                        log.exception("camera %s: no picture for the page", camera)
                    self._fault = str(error)
                    return given
            viewer.put(camera, made[size], now_s)
            given += 1
        self._fault = ""
        return given


class Viewer:
    """Somebody who looks at some cameras: gets the newest picture of each, and none before the last
    one of that camera was acknowledged. Safe from any thread."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._sizes: dict[str, SizeName] = {}
        self._due_s: dict[str, float] = {}
        self._ready: dict[str, bytes] = {}
        self._sent: deque[str] = deque()  # cameras of the pictures without an acknowledgement

    def look_at(self, sizes: Mapping[str, SizeName]) -> None:
        """Look at these cameras from now on, each in its size; at no others."""
        with self._lock:
            self._sizes = dict(sizes)
            self._due_s = {name: due for name, due in self._due_s.items() if name in sizes}
            self._ready = {name: data for name, data in self._ready.items() if name in sizes}

    def wants(self, camera: str, now_s: float) -> bool:
        """Whether a picture of `camera` would be of use at that moment."""
        with self._lock:
            size = self._sizes.get(camera)
            if size is None or camera in self._ready or camera in self._sent:
                return False
            # Frames come with jitter; so early is in time.
            return now_s >= self._due_s.get(camera, 0.0) - 0.25 / SIZES[size].max_hz

    def size_of(self, camera: str) -> SizeName | None:
        """The size of the pictures of `camera`; None where nobody looks at it."""
        with self._lock:
            return self._sizes.get(camera)

    def put(self, camera: str, picture: bytes, now_s: float) -> None:
        """Keep `picture` until `take`; returns at once."""
        with self._lock:
            size = self._sizes.get(camera)
            if size is None:
                return
            period_s = 1 / SIZES[size].max_hz
            self._due_s[camera] = period_s + max(
                self._due_s.get(camera, now_s), now_s - period_s / 4
            )
            self._ready[camera] = picture
        self._wake()

    def take(self) -> bytes | None:
        """Return the picture that waits longest; None where there is none."""
        with self._lock:
            if not self._ready:
                return None
            camera = next(iter(self._ready))
            self._sent.append(camera)
            return self._ready.pop(camera)

    def acknowledge(self) -> bool:
        """Note that the oldest picture that was taken is shown; False where there is none."""
        with self._lock:
            if not self._sent:
                return False
            self._sent.popleft()
            return True
