"""Event: a change of state that a reader may not miss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_server.settings.sections import EventKind  # noqa: TC001 - msgspec reads the annotation

EventPhase = Literal["begin", "end", "instant"]


@dataclass(frozen=True)
class Event:
    """One event, as `edge/lanes/v1/events.proto` describes it.

    Attributes:
        id: counts the events of `log`, across restarts too; 0 before the event log has given it.
        begin_id: the id of the event that began what this one ends.
        camera: empty where the event is of no camera.
        frame_id: of the frame that caused the event.
        cause: a word.
        text: the same for people.
        distance_to_line_m: of a departure; negative beyond the line.
        log: the identity of the event log, which gives it with the id.
    """

    kind: EventKind
    phase: EventPhase
    cause: str
    text: str
    mono_ns: int
    epoch_ns: int
    id: int = 0
    begin_id: int = 0
    camera: str = ""
    frame_id: int | None = None
    model: str = ""
    model_version: str = ""
    distance_to_line_m: float | None = None
    time_to_line_s: float | None = None
    log: str = ""
