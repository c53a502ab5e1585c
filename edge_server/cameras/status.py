"""The states of a camera, and the reason words of its faults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CameraState(Enum):
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
