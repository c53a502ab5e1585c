"""The states of a camera, the reason words of its faults, and the record of both."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from edge_server.process.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class CameraState(Enum):
    """The state of a camera."""

    STARTING = "starting"  # no frame yet
    LIVE = "live"
    DEGRADED = "degraded"  # frames arrive, and something is wrong with them
    STALLED = "stalled"  # open, and no frame within the time limit
    FROZEN = "frozen"  # frames arrive, and show the same picture
    LOST = "lost"  # the camera reopens the source until frames arrive
    ENDED = "ended"  # a recording has reached its end
    STOPPED = "stopped"


# Frames with one of these faults show no road: they get no lanes.
UNUSABLE = frozenset({"frozen", "black", "white_out", "covered"})


class PictureFault(NamedTuple):
    """What is wrong with the frames that arrive: a word for a program, and a text for people."""

    reason: str
    text: str


@dataclass(frozen=True)
class CameraStatus:
    """The state of a camera at one moment.

    Attributes:
        state: see `CameraState`.
        reason: one word for a program, empty where frames are as they should be: one of
            `SourceError.reason`, `no_frames` (none within the time limit after opening), `frozen`,
            `black`, `white_out`, `covered`, `dark`, `blurred`, `degraded`.
        text: the same for people.
        since_mono_ns: CLOCK_MONOTONIC of the last change of state or reason.
        since_epoch_ns: Unix time of the same moment.
    """

    state: CameraState
    reason: str = ""
    text: str = ""
    since_mono_ns: int = 0
    since_epoch_ns: int = 0

    @property
    def usable(self) -> bool:
        """Lanes can be detected in the frames that arrive now."""
        return self.state is CameraState.LIVE or (
            self.state is CameraState.DEGRADED and self.reason not in UNUSABLE
        )

    @property
    def arriving(self) -> bool:
        """Frames arrive, whatever they show."""
        return self.state in (CameraState.LIVE, CameraState.DEGRADED, CameraState.FROZEN)


class CameraStates:
    """The state of a camera over time; each change of state or reason is counted and logged once.

    Attributes:
        status: the present one.
        faults: number of times that each reason began.

    Args:
        camera: its name in the log.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, camera: str, clock: Callable[[], float]) -> None:
        self.faults: Counter[str] = Counter()
        self._camera = camera
        self._clock = clock
        self.status = self._now(CameraState.STARTING, "starting", "no frame yet")

    def set(self, state: CameraState, reason: str, text: str) -> bool:
        """Change the state; return False where only the text differs, or nothing."""
        text = masked(text)  # it is published
        before = self.status
        if (state, reason) == (before.state, before.reason):
            if text != before.text:
                self.status = replace(before, text=text)
            return False
        self.status = self._now(state, reason, text)
        is_fault = bool(reason) and state not in (CameraState.STARTING, CameraState.ENDED)
        self.faults[reason] += is_fault
        level = logging.WARNING if is_fault else logging.INFO
        word = f"{state.value}, {reason}" if is_fault and reason != state.value else state.value
        log.log(level, "camera %s: %s", self._camera, f"{word}: {text}" if text else word)
        return True

    def _now(self, state: CameraState, reason: str, text: str) -> CameraStatus:
        return CameraStatus(state, reason, text, round(self._clock() * 1e9), time.time_ns())
