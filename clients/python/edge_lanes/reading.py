"""What a device says of its lanes at one moment, or that it says nothing."""

from __future__ import annotations

import enum
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_lanes.v1 import lanes_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

SILENT_AFTER_S = 2.0


class State(enum.Enum):
    """Whether lanes may be acted upon: the frame's status, or SILENT where nothing arrives."""

    OK = lanes_pb2.FRAME_STATUS_OK
    DEGRADED = lanes_pb2.FRAME_STATUS_DEGRADED
    STALE = lanes_pb2.FRAME_STATUS_STALE
    INVALID = lanes_pb2.FRAME_STATUS_INVALID
    SILENT = -1


@dataclass(frozen=True)
class Reading:
    """The lanes of one frame of one camera, or the silence of all cameras.

    Attributes:
        state: see `State`.
        frame: None where the state is SILENT.
        lost: frames of this camera that this reader missed since its last reading of it.
        text: why the state is not OK, for people; where it is SILENT, the last error of the
            connection.
    """

    state: State
    frame: lanes_pb2.LaneFrame | None = None
    lost: int = 0
    text: str = ""

    @property
    def usable(self) -> bool:
        """The lanes are fresh. Where the state is DEGRADED, some may be missing."""
        return self.state in {State.OK, State.DEGRADED}

    @property
    def reasons(self) -> list[str]:
        """Why the state is not OK, each as its code without REASON_CODE_."""
        details = () if self.frame is None else self.frame.reason_details
        names = (lanes_pb2.ReasonCode.Name(each.code) for each in details)
        return [name.removeprefix("REASON_CODE_") for name in names]


def reading_of(frame: lanes_pb2.LaneFrame, lost: int) -> Reading:
    """Return the reading of a frame; a status that this version does not know is INVALID."""
    known = {state.value: state for state in State}
    text = "; ".join(each.text for each in frame.reason_details if each.text)
    return Reading(known.get(frame.status, State.INVALID), frame, lost, text)


def readings(
    next_item: Callable[[float], Reading | Exception],
    error_text: Callable[[], str],
    silent_after_s: float,
) -> Generator[Reading]:
    """Yield readings as they arrive, and SILENT after each `silent_after_s` without one.

    Args:
        next_item: waits for at most so many seconds, then raises `queue.Empty`.
        error_text: the last error of the connection.

    Raises:
        Exception: that `next_item` returns.
    """
    while True:
        try:
            item = next_item(silent_after_s)
        except queue.Empty:
            item = Reading(State.SILENT, text=error_text())
        if isinstance(item, Exception):
            raise item
        yield item
