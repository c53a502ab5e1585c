"""RoadEvents: the departure warnings, lane changes and degraded lanes of one camera, as events."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edge_server.lanes.departure import DepartureWatch
from edge_server.lanes.types import Departure
from edge_server.pipeline.events import Event

if TYPE_CHECKING:
    from edge_server.lanes.departure import DepartureChange, DepartureRule
    from edge_server.lanes.types import LaneFrame, Side
    from edge_server.pipeline.event_log import EventLog, Ticket
    from edge_server.pipeline.events import EventPhase
    from edge_server.pipeline.vehicle import VehicleState
    from edge_server.settings.sections import EventKind

# As `LaneLocator` begins its reasons.
_CALIBRATION = "calibration_"
_ENDINGS = {
    "returned": "the vehicle is back in its lane",
    "lane_changed": "the vehicle has changed its lane",
    "not_seen": "the boundary is not seen any more",
    "indicator": "the driver indicates",
    "slow": "the vehicle is too slow for warnings",
}


class RoadEvents:
    """Puts the events of a camera's tracked lanes into the log, once when each begins and once when
    it ends. For one thread; `update` returns at once.

    Args:
        log: gives the events their ids.
        rule: of departure warnings; None gives none.
    """

    def __init__(self, log: EventLog, rule: DepartureRule | None) -> None:
        self._log = log
        self._watch = None if rule is None else DepartureWatch(rule)
        self._departure: Ticket | None = None
        self._lane_change: tuple[Side, Ticket] | None = None
        self._degraded: tuple[str, Ticket] | None = None

    def update(self, frame: LaneFrame, vehicle: VehicleState) -> None:
        """Put what begins or ends with `frame`.

        Args:
            frame: tracked; one with a `failure` ends nothing but what its lanes cannot carry on.
            vehicle: at the capture.
        """
        if self._watch is not None:
            change = self._watch.update(
                frame.lanes, frame.capture_mono_ns, vehicle.speed_mps, vehicle.indicator
            )
            if change is not None:
                self._put_departure(frame, change)
        if not frame.failure:
            self._follow_lane_change(frame)
            self._follow_degraded(frame)

    def end(self, frame: LaneFrame) -> None:
        """End what holds, as nobody follows the camera any more.

        Args:
            frame: the last one, at the present moment.
        """
        holding: tuple[tuple[EventKind, str, Ticket | None], ...] = (
            ("lane_departure", "not_seen", self._departure),
            ("lane_change", *(self._lane_change or ("", None))),
            ("degraded", *(self._degraded or ("", None))),
        )
        for kind, cause, ticket in holding:
            if ticket is not None:
                text = "the camera is not followed any more"
                self._log.put(self._event(frame, kind, "end", cause, text), ticket)
        self._departure = self._lane_change = self._degraded = None

    @property
    def departure(self) -> Departure | None:
        """Whether the vehicle leaves its lane, as of the last `update`; None without a rule."""
        if self._watch is None:
            return None
        if (warning := self._watch.active) is not None:
            return Departure("warning", warning.side)
        if (withheld := self._watch.withheld) is not None:
            return Departure("withheld", withheld.side, withheld.cause or "")
        return Departure()

    def _put_departure(self, frame: LaneFrame, change: DepartureChange) -> None:
        near = f"{abs(change.distance_m):.2f} m"
        where = f"{near} beyond" if change.distance_m < 0 else f"{near} from"
        begins = change.cause is None
        text = f"the vehicle leaves its lane: its wheels are {where} the {change.side} boundary"
        event = self._event(
            frame,
            "lane_departure",
            "begin" if begins else "end",
            change.cause or change.side,
            text if change.cause is None else _ENDINGS[change.cause],
            distance_to_line_m=change.distance_m,
            time_to_line_s=change.time_to_line_s if math.isfinite(change.time_to_line_s) else None,
        )
        ticket = self._log.put(event, None if begins else self._departure)
        self._departure = ticket if begins else None

    def _follow_lane_change(self, frame: LaneFrame) -> None:
        side: Side = "none" if frame.ego is None else frame.ego.lane_change
        before = self._lane_change
        if side == ("none" if before is None else before[0]):
            return
        if before is not None:
            event = self._event(frame, "lane_change", "end", before[0], "the lane change has ended")
            self._log.put(event, before[1])
        self._lane_change = None
        if side != "none":
            text = f"the vehicle crosses the {side} boundary of its lane"
            self._lane_change = (
                side,
                self._log.put(self._event(frame, "lane_change", "begin", side, text)),
            )

    def _follow_degraded(self, frame: LaneFrame) -> None:
        # Faults of the camera and of the device are events of their own.
        of_road = (each for each in frame.degraded if each.startswith(_CALIBRATION))
        cause, _, text = next(of_road, "").partition(": ")
        before = self._degraded
        if cause == ("" if before is None else before[0]):
            return
        if before is not None:
            event = self._event(frame, "degraded", "end", before[0], "lanes are as they should be")
            self._log.put(event, before[1])
        self._degraded = None
        if cause:
            self._degraded = (
                cause,
                self._log.put(self._event(frame, "degraded", "begin", cause, text)),
            )

    @staticmethod
    def _event(
        frame: LaneFrame,
        kind: EventKind,
        phase: EventPhase,
        cause: str,
        text: str,
        *,
        distance_to_line_m: float | None = None,
        time_to_line_s: float | None = None,
    ) -> Event:
        return Event(
            kind,
            phase,
            cause,
            text,
            frame.capture_mono_ns,
            frame.capture_epoch_ns,
            camera=frame.camera,
            frame_id=frame.frame_id,
            model=frame.model_name,
            model_version=frame.model_version,
            distance_to_line_m=distance_to_line_m,
            time_to_line_s=time_to_line_s,
        )
