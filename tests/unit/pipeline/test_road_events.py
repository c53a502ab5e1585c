"""RoadEvents: each departure, lane change and degradation is one event that begins and one that
ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import Reason
from edge_server.lanes.departure import DepartureRule
from edge_server.lanes.types import (
    Departure,
    Ego,
    GroundLane,
    Lane,
    LaneFrame,
    Polynomial,
    VehicleState,
)
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.road_follower import RoadEvents

if TYPE_CHECKING:
    from edge_server.lanes.types import Indicator, Side
    from edge_server.pipeline.event_log import Event

FRAME_NS = 33_000_000
SILENT = DepartureRule(warns=False)


def frame(
    number: int, offset_m: float = 1.8, heading_rad: float = 0.0, **more: object
) -> LaneFrame:
    polynomial = Polynomial(np.array([offset_m, heading_rad, 0, 0.0]), np.eye(4) * 1e-6, 5.0, 40.0)
    points = np.array([[5, offset_m], [40, offset_m]], np.float32)
    left = Lane(points, 0.9, id=1, index=-1, ground=GroundLane(points, polynomial))
    made = LaneFrame(
        "front",
        number,
        0,
        number * FRAME_NS,
        number,
        1280,
        720,
        "lane_detection",
        "1",
        lanes=(left,),
    )
    return replace(made, **more)


def seen(*frames: LaneFrame, rule: DepartureRule = SILENT) -> list[Event]:
    log = EventLog()
    events = RoadEvents(log, rule)
    for each in frames:
        events.update(each, VehicleState(each.capture_mono_ns, 25.0, 0.0))
    log._end()
    return log.after(0)


def test_a_departure_begins_and_ends_once_with_the_frames_that_show_it() -> None:
    frames = [frame(n, 0.9 if 10 <= n < 40 else 1.8) for n in range(90)]
    begin, end = seen(*frames, rule=DepartureRule())
    assert (begin.kind, begin.phase, begin.cause) == ("lane_departure", "begin", "left")
    assert (begin.camera, begin.frame_id, begin.model_version) == ("front", 12, "1")
    assert begin.distance_to_line_m is not None
    assert begin.distance_to_line_m < 0
    assert (
        begin.text == "the vehicle leaves its lane: its wheels are 0.05 m beyond the left boundary"
    )
    assert begin.mono_ns == 12 * FRAME_NS
    assert (end.phase, end.cause, end.begin_id) == ("end", "returned", begin.id)


def test_a_departure_before_the_line_says_how_far_the_line_is() -> None:
    begin = seen(*(frame(n, 1.8 - 0.02 * n, -0.02) for n in range(40)), rule=DepartureRule())[0]
    assert begin.distance_to_line_m is not None
    assert begin.distance_to_line_m > 0
    assert f"{begin.distance_to_line_m:.2f} m from the left boundary" in begin.text


def test_the_lanes_say_why_a_departure_is_not_warned_of() -> None:
    log = EventLog()
    events, silent = RoadEvents(log, DepartureRule()), RoadEvents(log, SILENT)
    states = []
    for n in range(12):
        indicator: Indicator = "left" if 4 <= n < 8 else "off"
        each = frame(n, 0.9 if n < 11 else 1.8)
        for one in (events, silent):
            one.update(each, VehicleState(each.capture_mono_ns, 25.0, 0.0, indicator))
        states.append(events.departure)
    withheld, warning = Departure("withheld", "left", "indicator"), Departure("warning", "left")
    # The warning ends with the indicator, and begins again in the third frame after it.
    none = Departure()
    assert states == [none] * 2 + [warning] * 2 + [withheld] * 4 + [none] * 2 + [warning] * 2
    assert silent.departure is None
    log._end()
    causes = [(event.phase, event.cause) for event in log.after(0)]
    assert causes == [("begin", "left"), ("end", "indicator"), ("begin", "left")]


def test_without_a_rule_nothing_is_warned_of() -> None:
    assert not seen(*(frame(n, 0.5) for n in range(30)))


def test_a_lane_change_begins_and_ends() -> None:
    def sides(*spans: tuple[Side, int]) -> list[LaneFrame]:
        chosen = [side for side, count in spans for _ in range(count)]
        return [frame(n, ego=Ego(lane_change=side)) for n, side in enumerate(chosen)]

    begin, end, other = seen(*sides(("none", 3), ("left", 5), ("none", 2), ("right", 1)))
    assert (begin.kind, begin.phase, begin.cause, begin.frame_id) == (
        "lane_change",
        "begin",
        "left",
        3,
    )
    assert (end.phase, end.begin_id, end.frame_id) == ("end", begin.id, 8)
    assert (other.phase, other.cause) == ("begin", "right")


def test_a_calibration_that_is_wrong_begins_and_ends() -> None:
    drift = Reason("calibration_drift", "0.7 degrees down")
    size = Reason("calibration_size", "another shape")
    dark, hot = Reason("dark", "night"), Reason("throttled", "93 C")
    reasons = [(), (dark, drift), (drift, hot), (size,), (dark,)]
    events = seen(*(frame(n, degraded=reason) for n, reason in enumerate(reasons)))
    assert [(each.phase, each.cause, each.frame_id) for each in events] == [
        ("begin", "calibration_drift", 1),
        ("end", "calibration_drift", 3),
        ("begin", "calibration_size", 3),
        ("end", "calibration_size", 4),
    ]
    assert events[0].text == "0.7 degrees down"


def test_a_frame_without_lanes_ends_no_lane_change() -> None:
    changing = frame(0, ego=Ego(lane_change="left"))
    failed = frame(1, failure="out of memory")
    assert len(seen(changing, failed, replace(changing, frame_id=2))) == 1


def test_who_is_followed_no_more_has_nothing_left_that_holds() -> None:
    drift = (Reason("calibration_drift", "0.7 degrees down"),)
    changing = Ego(lane_change="left")
    log = EventLog()
    events = RoadEvents(log, DepartureRule())
    for n in range(4):
        leaving = frame(n, 0.9, degraded=drift, ego=changing)
        events.update(leaving, VehicleState(leaving.capture_mono_ns, 25.0, 0.0))
    for _ in range(2):
        events.end(frame(4))
    log._end()
    found = log.after(0)
    assert [each.phase for each in found] == ["begin"] * 3 + ["end"] * 3
    assert {each.begin_id for each in found[3:]} == {each.id for each in found[:3]}
    assert {(each.kind, each.cause) for each in found[3:]} == {
        ("lane_departure", "not_seen"),
        ("lane_change", "left"),
        ("degraded", "calibration_drift"),
    }
