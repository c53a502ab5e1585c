"""Fair shares: in which order cameras may use one model, and how many at a time."""

from __future__ import annotations

import threading
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import StepTiming

# One more frame at a time costs each frame the age of a whole run; up to a fifth of the throughput
# is worth less than that.
_SPARE = 0.25
# Of a new measurement: a busy machine stretches single steps of single frames.
_WEIGHT = 1 / 32
_START_TAG = attrgetter("start_tag")


class CameraShare:
    """One camera's share of the turns at a model.

    Args:
        priority: 1 and above; a camera of priority 2 gets twice the turns of one of 1.
    """

    def __init__(self, priority: int, lock: threading.Lock) -> None:
        self.cost = 1 / priority
        self.start_tag = self.finish_tag = 0.0
        self.waits = self.has_turn = False
        self.changed = threading.Condition(lock)


class FairShares:
    """Grants turns at one model to its cameras: no camera starves, none gets more than its share.

    Cameras that wait all the time get turns in proportion to their priorities; one that wants less
    than its share gets a turn for each frame, and the others share the rest. This is start-time
    fair queueing (Goyal, Vin, Cheng 1996) with a cost of 1 for each turn; among equals the first to
    come is served first. Only `limit` turns run at a time, so frames do not age in a queue of the
    model: a camera takes its newest frame when its turn begins. A camera has one turn at a time, so
    no priority gives it more than one of `limit` places.

    Safe from any thread.

    Attributes:
        cameras: number of shares.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit = 1
        self._useful: float | None = None
        self.cameras = 0
        self._running = 0
        self._waiting: list[CameraShare] = []
        self._latest_start_tag = 0.0

    @property
    def limit(self) -> int:
        """Number of turns that run at a time."""
        return self._limit

    def adapt(self, useful: float) -> None:
        """Bring `limit` nearer to `useful`, what `frames_at_once` returned for one frame."""
        with self._lock:
            before = useful if self._useful is None else self._useful
            self._useful = before + _WEIGHT * (useful - before)
            self._limit = max(1, ceil(self._useful - _SPARE))
            self._grant()

    def share(self, priority: int) -> CameraShare:
        """Return the share of one more camera; see `CameraShare`."""
        self.cameras += 1
        return CameraShare(priority, self._lock)

    def take_turn(self, share: CameraShare, timeout_s: float) -> bool:
        """Wait for a turn; return whether it has begun.

        After False the share keeps its place in the order, and a later call continues the wait.
        """
        with self._lock:
            if not (share.waits or share.has_turn):
                self._grant(share)
            return share.has_turn or share.changed.wait_for(lambda: share.has_turn, timeout_s)

    def end_turn(self, share: CameraShare, *, again: bool = False) -> None:
        """End the turn, or give up the place in the order; without either do nothing.

        Args:
            again: the camera has its next frame already, and waits for its next turn at once.
                Otherwise the other one of two cameras would always be next, whatever its priority.
        """
        with self._lock:
            if share.waits:
                self._waiting.remove(share)
            self._running -= share.has_turn
            share.waits = share.has_turn = False
            self._grant(share if again else None)

    def _grant(self, joining: CameraShare | None = None) -> None:
        if joining is not None:
            joining.start_tag = max(self._latest_start_tag, joining.finish_tag)
            joining.waits = True
            self._waiting.append(joining)
        while self._waiting and self._running < self._limit:
            share = min(self._waiting, key=_START_TAG)
            self._waiting.remove(share)
            self._running += 1
            self._latest_start_tag = share.start_tag
            share.finish_tag = share.start_tag + share.cost
            share.waits, share.has_turn = False, True
            share.changed.notify()


def frames_of(config: ModelConfig) -> int:
    """Return how many frames the instances of a model take at a time."""
    instances = sum(len(group.placements) for group in config.instance_groups if not group.passive)
    rows = config.max_batch_size if config.dynamic_batching is not None else 1
    return max(1, instances) * max(1, rows)


def frames_at_once(timings: Sequence[StepTiming], frames_of: Mapping[str, int]) -> float:
    """Return how many frames keep the slowest step of a model busy, and no more (Little's law).

    That is 1 for a model with one instance, little more for one between quick steps, and as many as
    the rows of a batch for a step with dynamic batching.

    Args:
        frames_of: see `frames_of`, by the name of the step's model.
    """
    total_ns, slowest_ns = 0, 0.0
    for timing in timings:
        total_ns += timing.duration_ns
        slowest_ns = max(slowest_ns, timing.duration_ns / frames_of.get(timing.model_name, 1))
    return total_ns / slowest_ns if slowest_ns else 1.0
