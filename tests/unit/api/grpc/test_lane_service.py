"""LaneServicer: what a call may say, and what it gets, without a server."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.waiting import wait_until

from edge_server.api.admission import Admission
from edge_server.api.grpc.lane_service import LaneServicer, LaneSources, too_many_lane_streams
from edge_server.api.grpc.traffic import Traffic
from edge_server.board.board import Identity
from edge_server.errors import (
    EdgeServerError,
    InvalidRequest,
    LimitReached,
    NotFound,
    OutOfRange,
    Unavailable,
)
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.pipeline.lane_feed import LaneFeed
from edge_server.pipeline.vehicle import VehicleInputs
from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOW_NS = 90_000_000_000
IDENTITY = Identity("truck-7", "1", "boot", "client")
WAIT_S = 30.0


class Context:
    """A call whose client is there until `leave`."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def cancel(self) -> None:
        self.leave()

    def leave(self) -> None:
        for callback in self._callbacks:
            callback()


class NamedCamera:
    name = "front"


class NamedPipeline:
    camera = NamedCamera()
    model = "lanes"


class Service:
    def __init__(self) -> None:
        self.feed = LaneFeed(IDENTITY)
        self.events = EventLog()
        self.vehicle = VehicleInputs()
        given = self.feed, LaneFeed(IDENTITY), self.events, self.vehicle
        sources = LaneSources(IDENTITY, *given, [NamedPipeline()])
        self.gate = Admission(0, 2, too_many_lane_streams)
        self.servicer = LaneServicer(sources, self.gate, Traffic(), lambda: NOW_NS)

    def put_event(self) -> int:
        self.events.put(Event("model", "instant", "loaded", "it serves", 1, 1))
        self.events._tick(0.0)
        return self.events.newest

    def lanes(self, *requests: pb.StreamLanesRequest) -> tuple[Iterator[bytes], Context]:
        context = Context()
        written = iter([request.SerializeToString() for request in requests])
        return self.servicer.StreamLanes(written, context), context


@pytest.fixture
def service() -> Service:
    return Service()


def frame(camera: str = "front", **fields: Any) -> LaneFrame:
    return LaneFrame(camera, 5, 0, NOW_NS - 20_000_000, 1, 1280, 720, "lane_detection", **fields)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.StreamLanesRequest(cameras=["front", "rear"]), NotFound),
        (pb.StreamLanesRequest(max_hz=-1), InvalidRequest),
        (pb.StreamLanesRequest(max_hz=float("nan")), InvalidRequest),
        (pb.StreamLanesRequest(max_hz=float("inf")), InvalidRequest),
        (pb.StreamLanesRequest(acknowledged=1), InvalidRequest),
    ],
)
def test_a_first_request_that_makes_no_sense_is_refused(
    service: Service, request_: pb.StreamLanesRequest, error: type[EdgeServerError]
) -> None:
    responses, _ = service.lanes(request_)
    with pytest.raises(error):
        next(responses)


@pytest.mark.parametrize("data", [None, b"\xff", b"\x0a" + bytes([0xFF, 0xFF, 0x7F])])
@pytest.mark.parametrize("method", ["StreamLanes", "StreamEvents"])
def test_no_request_and_bytes_that_are_none_are_refused(
    service: Service, method: str, data: bytes | None
) -> None:
    requests = iter([] if data is None else [data])
    with pytest.raises(InvalidRequest):
        next(getattr(service.servicer, method)(requests, Context()))


@pytest.mark.parametrize(
    "later",
    [
        pb.StreamLanesRequest(cameras=["front"]),
        pb.StreamLanesRequest(max_hz=1),
        pb.StreamLanesRequest(window=3),
        pb.StreamLanesRequest(acknowledged=99),
    ],
)
def test_a_later_request_only_acknowledges(service: Service, later: pb.StreamLanesRequest) -> None:
    responses, _ = service.lanes(pb.StreamLanesRequest(window=1), later)
    with pytest.raises(InvalidRequest):
        list(responses)


def test_the_age_is_that_of_the_sending(service: Service) -> None:
    service.feed(frame())
    responses, _ = service.lanes(pb.StreamLanesRequest())
    response = pb.StreamLanesResponse.FromString(next(responses))
    assert (response.sequence, response.lost) == (1, 0)
    assert response.frame.time.age_us == 20_000
    latest = service.servicer.GetLatestLanes(pb.GetLatestLanesRequest(camera="front"))
    assert latest.frame == response.frame


def test_the_latest_lanes_are_of_a_camera_that_is_there_and_has_some(service: Service) -> None:
    get = service.servicer.GetLatestLanes
    with pytest.raises(InvalidRequest):
        get(pb.GetLatestLanesRequest())
    with pytest.raises(NotFound, match="there are: front"):
        get(pb.GetLatestLanesRequest(camera="rear"))
    with pytest.raises(Unavailable):
        get(pb.GetLatestLanesRequest(camera="front"))


def test_streams_have_their_number_and_end_with_the_daemon(service: Service) -> None:
    service.feed(frame())
    opened = [service.lanes(pb.StreamLanesRequest()) for _ in range(2)]
    for responses, _ in opened:
        next(responses)
    refused, _ = service.lanes(pb.StreamLanesRequest())
    with pytest.raises(LimitReached, match="max_lane_streams"):
        next(refused)
    first, context = opened[0]
    context.leave()
    assert list(first) == []
    again, _ = service.lanes(pb.StreamLanesRequest())
    next(again)
    service.gate.close()
    for responses in (opened[1][0], again):
        with pytest.raises(Unavailable, match="shutting down"):
            next(responses)


def events_of(service: Service, request: pb.StreamEventsRequest) -> tuple[Iterator[bytes], Context]:
    context = Context()
    requests = iter([request.SerializeToString()])
    return service.servicer.StreamEvents(requests, context), context


def test_events_begin_where_the_reader_wants(service: Service) -> None:
    ids = [service.put_event() for _ in range(3)]
    kept, _ = events_of(service, pb.StreamEventsRequest(after_id=0))
    later, _ = events_of(service, pb.StreamEventsRequest(after_id=ids[1]))
    assert [pb.StreamEventsResponse.FromString(next(kept)).event.id for _ in ids] == ids
    assert pb.StreamEventsResponse.FromString(next(later)).event.id == ids[2]
    later.close()  # type: ignore[attr-defined]  # its place is for the next
    beyond, _ = events_of(service, pb.StreamEventsRequest(after_id=ids[2] + 1))
    with pytest.raises(OutOfRange):
        next(beyond)


def test_without_an_id_only_events_from_now_on_come(service: Service) -> None:
    before = service.put_event()
    responses, context = events_of(service, pb.StreamEventsRequest())
    found: list[int] = []

    def read() -> None:
        found.extend(pb.StreamEventsResponse.FromString(each).event.id for each in responses)

    thread = threading.Thread(target=read)
    thread.start()
    # The stream's beginning is what "now" is.
    wait_until(lambda: service.put_event() and found)
    context.leave()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "a client that left ends its stream"
    assert before not in found


def test_the_vehicles_state_reaches_tracking(service: Service) -> None:
    request = pb.SetVehicleStateRequest(speed_mps=21.5, indicator=pb.INDICATOR_LEFT)
    service.servicer.SetVehicleState(request)
    state = service.vehicle.at(NOW_NS)
    assert state is not None
    assert (state.speed_mps, state.yaw_rate_radps, state.indicator) == (21.5, None, "left")
    assert state.mono_ns == NOW_NS


@pytest.mark.parametrize(
    "request_",
    [
        pb.SetVehicleStateRequest(speed_mps=float("nan")),
        pb.SetVehicleStateRequest(yaw_rate_radps=float("-inf")),
        pb.SetVehicleStateRequest(mono_ns=-1),
        pb.SetVehicleStateRequest(mono_ns=NOW_NS + 1_000_000_000),
        pb.SetVehicleStateRequest.FromString(b"\x18\x09"),
        # In the trackers' powers of the way ahead they have no result.
        pb.SetVehicleStateRequest(speed_mps=1e300),
        pb.SetVehicleStateRequest(yaw_rate_radps=-1e308),
    ],
)
def test_a_state_that_cannot_be_is_refused(
    service: Service, request_: pb.SetVehicleStateRequest
) -> None:
    with pytest.raises(InvalidRequest):
        service.servicer.SetVehicleState(request_)
    assert service.vehicle.at(NOW_NS) is None


def test_a_recording_is_requested_with_its_seconds_or_those_of_the_settings() -> None:
    asked: list[tuple[str, float | None, float | None]] = []

    def record(*request: Any) -> str:
        asked.append(request)
        return "1.mcap"

    service = Service()
    servicer = LaneServicer(
        replace(service.servicer._sources, record=record), service.gate, Traffic()
    )
    assert servicer.Record(pb.RecordRequest(cause="a", after_s=2)).file == "1.mcap"
    servicer.Record(pb.RecordRequest(before_s=0))
    assert asked == [("a", None, 2.0), ("", 0.0, None)]
    for wrong in ({"before_s": -1}, {"before_s": 61}, {"after_s": 301}, {"after_s": float("nan")}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(wrong))} is .*: it is 0 to "):
            servicer.Record(pb.RecordRequest(**wrong))
    with pytest.raises(InvalidRequest, match="cause has 201 characters"):
        servicer.Record(pb.RecordRequest(cause="a" * 201))


def test_a_recording_without_a_recorder_says_how_to_get_one() -> None:
    with pytest.raises(Unavailable, match=r"the recorder is off; set recorder\.mode"):
        Service().servicer.Record(pb.RecordRequest(cause="a"))
