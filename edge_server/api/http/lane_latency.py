"""LaneLatency: latency of a frame's lanes by stage, for the metrics."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame

# 1 ms … 500 ms: a camera delivers 10 to 60 frames/s, and lanes older than 0.2 s are stale.
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Distribution:
    """Number of observations up to each bound; cumulative, the last one is all of them.

    Attributes:
        at_most: one per bound of `BOUNDS_S`, and one for the rest.
        sum_s: of all observations, in seconds.
    """

    at_most: tuple[int, ...]
    sum_s: float


class LaneLatency:
    """Counts the latencies of every LaneFrame with a response; a listener of LanePipelines.

    Args:
        now_ns: the clock of the frames' capture times; `time.monotonic_ns`.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, str], _Buckets] = {}
        self._end_to_end: dict[str, _Buckets] = {}

    def __call__(self, lane_frame: LaneFrame, frame: Frame) -> None:
        """Takes some microseconds; safe from any thread."""
        del frame
        if lane_frame.failure:
            return
        age_ns = lane_frame.age_ns(self._now_ns())
        latency_us = lane_frame.latency_us
        spent_us = {
            "queue": latency_us.queue,
            "preprocess": latency_us.preprocess,
            "infer": latency_us.infer,
            "postprocess": latency_us.postprocess,
        }
        camera = lane_frame.camera
        with self._lock:
            for stage, us in spent_us.items():
                self._stages.setdefault((camera, stage), _Buckets()).add(us / 1e6)
            self._end_to_end.setdefault(camera, _Buckets()).add(age_ns / 1e9)

    def stages(self) -> dict[tuple[str, str], Distribution]:
        """Return (camera, stage) → latency distribution."""
        with self._lock:
            return {key: buckets.distribution() for key, buckets in self._stages.items()}

    def end_to_end(self) -> dict[str, Distribution]:
        """Return camera → distribution of a frame's age when its lanes were detected."""
        with self._lock:
            return {key: buckets.distribution() for key, buckets in self._end_to_end.items()}


class _Buckets:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def distribution(self) -> Distribution:
        return Distribution(tuple(accumulate(self._counts)), self._sum_s)
