"""LaneFeed: the newest lanes of each camera, handed to any number of readers; LaneLatency: how late
they are."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import DeadlineExceeded
from edge_server.pipeline.messages import LaneMessage
from edge_server.pipeline.perception import NetworkFrame
from edge_server.process.histogram import FRAME_BOUNDS_S, Histograms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from edge_server.board.board import Identity
    from edge_server.cameras.frame import Frame
    from edge_server.errors import EdgeServerError
    from edge_server.lanes.types import LaneFrame
    from edge_server.process.histogram import Distribution


# A reader whose window is full for longer gives up its place.
LONGEST_UNACKNOWLEDGED_S = 60.0


class LaneFeed:
    """A listener of the pipelines, or of networks; no reader makes one wait. Safe from any
    thread."""

    def __init__(self, identity: Identity, now_s: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._now_s = now_s
        self._seq: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._newest: dict[str, LaneMessage] = {}
        self._lock = threading.Lock()
        self._readers: tuple[LaneReader, ...] = ()

    def __call__(self, lane_frame: LaneFrame, _: Frame | None = None) -> None:
        """Give a frame's lanes to every reader of its camera; for one thread of each camera. In a
        feed of networks CAMERA/NETWORK stands for the camera."""
        camera = lane_frame.camera
        if isinstance(lane_frame, NetworkFrame):
            camera = f"{camera}/{lane_frame.network}"
        message = LaneMessage(lane_frame, self._identity, next(self._seq[camera]))
        with self._lock:
            self._newest[camera] = message
            readers = self._readers
        now_s = self._now_s()
        for reader in readers:
            reader.put(camera, message, now_s)

    def holds(self, camera: str) -> bool:
        """Whether a reader has lanes of a camera to take, which the next ones would replace."""
        now_s = self._now_s()
        return any(reader.holds(camera, now_s) for reader in self._readers)

    def newest(self, camera: str) -> LaneMessage | None:
        """Return the newest lanes of a camera; None before its first frame."""
        return self._newest.get(camera)

    def newest_of(self, camera: str) -> list[LaneMessage]:
        """Return what each network of a camera has found last; of a feed of networks."""
        with self._lock:
            return [m for name, m in self._newest.items() if name.startswith(f"{camera}/")]

    def forget(self, camera: str) -> None:
        """Forget the lanes of a camera that was removed, or what its networks found; the count
        goes on if it comes back."""
        with self._lock:
            for name in list(self._newest):
                if name.partition("/")[0] == camera:
                    del self._newest[name]

    def open(
        self, cameras: Collection[str] = (), *, max_hz: float = 0.0, window: int = 0
    ) -> LaneReader:
        """Return a new reader, which `close` must get back; it begins with the newest lanes.

        Args:
            cameras: empty for all, those that come later too.
        """
        reader = LaneReader(frozenset(cameras), max_hz, window)
        with self._lock:
            self._readers = (*self._readers, reader)
            newest = dict(self._newest)
        now_s = self._now_s()
        for camera, message in newest.items():
            reader.put(camera, message, now_s)
        return reader

    def close(self, reader: LaneReader) -> None:
        """Give `reader` no more lanes, and end it."""
        with self._lock:
            self._readers = tuple(each for each in self._readers if each is not reader)
        reader.end()


class LaneDelivery(NamedTuple):
    """What a reader takes at once.

    Attributes:
        sequence: counts what this reader has taken, from 1.
        lost: number of frames of this camera that the reader lost since it last took one.
    """

    sequence: int
    message: LaneMessage
    lost: int


class _Waiting(NamedTuple):
    message: LaneMessage
    lost: int


class LaneReader:
    """The mailbox of one reader: the newest lanes of each camera, the one that waits longest first.

    A newer frame replaces one that the reader has not taken, which is lost.

    Args:
        cameras: whose lanes it gets; empty for all.
        max_hz: at most so many frames a second of each camera, evenly; others are not lost, but
            left out. 0 is every frame.
        window: at most so many deliveries without an acknowledgement; 0 is no bound. A reader that
            acknowledges none of them for 60 s while lanes come is ended with DeadlineExceeded.
    """

    def __init__(self, cameras: frozenset[str], max_hz: float, window: int) -> None:
        self._cameras = cameras
        self._period_s = 1 / max_hz if max_hz else 0.0
        self._window = window
        self._changed = threading.Condition()  # over an RLock: `end` is called with it held
        self._waiting: dict[str, _Waiting] = {}
        self._newest_seq: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._taken = 0
        self._acknowledged = 0
        self._acknowledges = True
        self._full_since_s: float | None = None
        self._ended = False
        self._error: EdgeServerError | None = None

    def put(self, camera: str, message: LaneMessage, now_s: float) -> None:
        """Keep `message` as the newest of its camera; returns at once."""
        if self._cameras and camera not in self._cameras:
            return
        with self._changed:
            self._check_acknowledgements(now_s)
            # `open` may give the same frame, or the one before, at the same time.
            if message.seq <= self._newest_seq.get(camera, -1):
                return
            self._newest_seq[camera] = message.seq
            if not self._is_due(camera, now_s):
                return
            before = self._waiting.get(camera)
            # In its place in the order, so that a fast camera does not starve another.
            self._waiting[camera] = _Waiting(message, 0 if before is None else before.lost + 1)
            self._changed.notify_all()

    def holds(self, camera: str, now_s: float) -> bool:
        """Whether lanes of a camera wait to be taken; not once the reader is over."""
        with self._changed:
            self._check_acknowledgements(now_s)
            return camera in self._waiting and not self._is_over()

    def take(self, timeout_s: float | None = None) -> LaneDelivery | None:
        """Wait for the next lanes; return None at the end, or after `timeout_s`.

        Raises:
            EdgeServerError: the reader was ended with it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._may_take(), timeout_s)
            if self._error is not None:
                raise self._error
            if self._is_over() or not self._may_take():
                return None
            camera = next(iter(self._waiting))
            message, lost = self._waiting.pop(camera)
            self._taken += 1
            return LaneDelivery(self._taken, message, lost)

    def acknowledge(self, sequence: int) -> bool:
        """Note that everything up to `sequence` is used; return False if that was not taken yet."""
        with self._changed:
            if sequence > self._taken:
                return False
            self._acknowledged = max(sequence, self._acknowledged)
            self._full_since_s = None
            self._changed.notify_all()
            return True

    def acknowledge_no_more(self) -> None:
        """Note that no acknowledgement will come: the reader ends once its window is used up."""
        with self._changed:
            self._acknowledges = False
            self._changed.notify_all()

    def end(self, error: EdgeServerError | None = None) -> None:
        """End every `take`, with `error` where there is one; returns at once."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
            self._changed.notify_all()

    def _check_acknowledgements(self, now_s: float) -> None:
        if not self._is_window_full():
            return
        if self._full_since_s is None:
            self._full_since_s = now_s
        elif now_s - self._full_since_s > LONGEST_UNACKNOWLEDGED_S:
            self.end(
                DeadlineExceeded(
                    f"{self._window} responses were not acknowledged for "
                    f"{LONGEST_UNACKNOWLEDGED_S:g} s; acknowledge what was used, and open the "
                    "stream again"
                )
            )

    def _may_take(self) -> bool:
        return bool(self._waiting) and not self._is_window_full()

    def _is_window_full(self) -> bool:
        return bool(self._window) and self._taken - self._acknowledged >= self._window

    def _is_over(self) -> bool:
        return self._ended or (self._is_window_full() and not self._acknowledges)

    def _is_due(self, camera: str, now_s: float) -> bool:
        if not self._period_s:
            return True
        # Frames come with jitter; so early is in time.
        early_s = self._period_s / 4
        due_s = self._due_s.get(camera, now_s)
        if now_s < due_s - early_s:
            return False
        self._due_s[camera] = max(due_s, now_s - early_s) + self._period_s
        return True


class LaneLatency:
    """Counts the latencies of every LaneFrame with a response; a listener of LanePipelines.

    Args:
        now_ns: the clock of the frames' capture times; `time.monotonic_ns`.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._histograms = Histograms(FRAME_BOUNDS_S)
        # By camera: when its newest valid lanes came; the number of its newest lanes and the
        # highest confidence. Single steps on a dict need no lock.
        self._valid_ns: dict[str, int] = {}
        self._newest: dict[str, tuple[int, float]] = {}

    def __call__(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        """Takes some microseconds; safe from any thread."""
        del frame
        if lane_frame.failure:
            return
        now_ns = self._now_ns()
        age_s = lane_frame.age_ns(now_ns) / 1e9
        camera, latency_us, lanes = lane_frame.camera, lane_frame.latency_us, lane_frame.lanes
        if 1e3 * age_s <= lane_frame.max_age_ms:
            self._valid_ns[camera] = now_ns
        self._newest[camera] = len(lanes), max([lane.score for lane in lanes], default=0.0)
        self._histograms.observe(
            {
                (camera, "queue"): latency_us.queue / 1e6,
                (camera, "preprocess"): latency_us.preprocess / 1e6,
                (camera, "infer"): latency_us.infer / 1e6,
                (camera, "postprocess"): latency_us.postprocess / 1e6,
                (camera,): age_s,
            }
        )

    def frames(self) -> int:
        """Return how many frames of the present cameras have had lanes."""
        return sum([each.at_most[-1] for each in self.end_to_end().values()])

    def stages(self) -> Mapping[tuple[str, ...], Distribution]:
        """Return (camera, stage) → latency distribution."""
        return {key: e for key, e in self._histograms.distributions().items() if len(key) == 2}

    def end_to_end(self) -> Mapping[tuple[str, ...], Distribution]:
        """Return (camera,) → distribution of a frame's age when its lanes were detected."""
        return {key: e for key, e in self._histograms.distributions().items() if len(key) == 1}

    def last_valid_age_s(self, camera: str) -> float | None:
        """Return the time since lanes came that were not stale; None before the first ones."""
        valid_ns = self._valid_ns.get(camera)
        return None if valid_ns is None else (self._now_ns() - valid_ns) / 1e9

    def newest(self, camera: str) -> tuple[int, float] | None:
        """Return how many lanes the newest frame has, and the highest confidence; None before the
        first ones."""
        return self._newest.get(camera)

    def forget(self, camera: str) -> None:
        """Drop the counts of a camera that was removed."""
        self._valid_ns.pop(camera, None)
        self._newest.pop(camera, None)
        self._histograms.forget(camera)
