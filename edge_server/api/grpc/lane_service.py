"""LaneServicer: the methods of `edge.lanes.v1.LaneService` and of
`edge.perception.v1.PerceptionService`; the .proto files have their rules."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from edge_server.api.admission import SHUTTING_DOWN
from edge_server.api.grpc.methods import parsing
from edge_server.cameras.status import CameraState
from edge_server.errors import (
    InvalidRequest,
    LimitReached,
    NotFound,
    OutOfRange,
    Unavailable,
)
from edge_server.pipeline.messages import calibration_message, event_message
from edge_server.pipeline.vehicle import vehicle_state
from edge_server.process.text import as_utf8
from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as pb
from edge_server.proto.edge.perception.v1 import perception_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.api.admission import Admission
    from edge_server.api.grpc.traffic import Traffic
    from edge_server.board.board import Identity
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.lane_feed import LaneFeed, LaneReader
    from edge_server.pipeline.lane_pipeline import LanePipeline
    from edge_server.pipeline.vehicle import VehicleInputs

log = logging.getLogger(__name__)

SERVICES = (
    pb.DESCRIPTOR.services_by_name["LaneService"],
    perception_pb2.DESCRIPTOR.services_by_name["PerceptionService"],
)
_LONGEST_CAUSE = 200


@dataclass(frozen=True)
class LaneSources:
    """What the service reads from and writes to.

    Attributes:
        pipelines: of the present cameras.
        record: see `Recorder.request`; None where the recorder is off.
        networks: what the other networks of cameras find.
    """

    identity: Identity
    feed: LaneFeed
    networks: LaneFeed
    events: EventLog
    vehicle: VehicleInputs
    pipelines: Sequence[LanePipeline]
    record: Callable[[str, float | None, float | None], str] | None = None


class LaneServicer:
    def __init__(
        self,
        sources: LaneSources,
        streams: Admission,
        traffic: Traffic,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sources = sources
        self._streams = streams
        self._traffic = traffic
        self._now_ns = now_ns

    def StreamLanes(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        def chosen(first: Any) -> Sequence[str]:
            self._refuse_unknown(first.cameras)
            return tuple(first.cameras)

        kinds = pb.StreamLanesRequest, pb.StreamLanesResponse
        yield from self._stream(requests, context, self._sources.feed, kinds, chosen)

    def StreamNetworks(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        def chosen(first: Any) -> Sequence[str]:
            known = [
                network.source
                for pipeline in tuple(self._sources.pipelines)
                for network in pipeline.networks
            ]
            for name in first.networks:
                if name not in known:
                    there = ", ".join(known) or "none"
                    raise NotFound(f"no network '{name}' is in the settings; there are: {there}")
            return tuple(first.networks)

        kinds = perception_pb2.StreamNetworksRequest, perception_pb2.StreamNetworksResponse
        yield from self._stream(requests, context, self._sources.networks, kinds, chosen)

    def _stream(
        self,
        requests: Iterator[bytes],
        context: Any,
        feed: LaneFeed,
        kinds: tuple[Any, Any],
        chosen: Callable[[Any], Sequence[str]],
    ) -> Iterator[bytes]:
        """Give what `feed` has of the chosen names, as requests and responses of `kinds`."""
        kind, response_kind = kinds
        with self._opened(context) as when_closed:
            first = _parse(self._traffic.read(requests, context), kind)
            if not (math.isfinite(first.max_hz) and first.max_hz >= 0):
                raise InvalidRequest(
                    f"max_hz is {first.max_hz:g}: it is 0 or positive, frames a second"
                )
            if first.acknowledged:
                raise InvalidRequest(
                    "the first request acknowledges a response, and none was sent yet"
                )
            reader = feed.open(chosen(first), max_hz=first.max_hz, window=first.window)
            when_closed.append(lambda: reader.end(_ending()))
            try:
                if not context.add_callback(reader.end):
                    return
                threading.Thread(
                    target=_read_acknowledgements,
                    args=(requests, reader, kind),
                    name="grpc-acknowledgements",
                    daemon=True,
                ).start()
                while (delivery := reader.take()) is not None:
                    response = response_kind(
                        sequence=delivery.sequence,
                        frame=delivery.message.sent_at(self._now_ns()),
                        lost=delivery.lost,
                    )
                    yield response.SerializeToString()
            finally:
                feed.close(reader)

    def GetLatestLanes(self, request: Any) -> Any:
        if not request.camera:
            raise InvalidRequest("camera is empty: it is the name of a camera, see ListCameras")
        self._refuse_unknown([request.camera])
        message = self._sources.feed.newest(request.camera)
        if message is None:
            raise Unavailable(f"camera '{request.camera}' has given no frame yet")
        return pb.GetLatestLanesResponse(frame=message.sent_at(self._now_ns()))

    def StreamEvents(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        events = self._sources.events
        ended = threading.Event()
        shut = threading.Event()

        def end() -> None:
            ended.set()
            events.wake()

        def shut_down() -> None:
            shut.set()
            end()

        with self._opened(context) as when_closed:
            request = _parse(self._traffic.read(requests, context), pb.StreamEventsRequest)
            newest = events.newest
            after_id = request.after_id if request.HasField("after_id") else newest
            if request.after_id and request.log not in ("", events.id):
                raise OutOfRange(
                    f"after_id is of the log {request.log!r}, and this one is {events.id!r}: it is "
                    "of another device, or this one's events were erased; begin with 0"
                )
            if after_id > newest:
                raise OutOfRange(
                    f"after_id is {after_id}, and the newest event is {newest}: it is of another "
                    "device, or this one's events were erased; begin with 0"
                )
            when_closed.append(shut_down)
            if not context.add_callback(end):
                return
            while events.wait_after(after_id, ended=ended.is_set) and not ended.is_set():
                for event in events.after(after_id):
                    if ended.is_set():
                        break
                    after_id = event.id
                    message = event_message(event, self._sources.identity)
                    yield pb.StreamEventsResponse(event=message).SerializeToString()
            if shut.is_set():
                raise _ending()

    def ListCameras(self, request: Any) -> Any:
        response = pb.ListCamerasResponse()
        for pipeline in tuple(self._sources.pipelines):
            camera, status = pipeline.camera, pipeline.camera.status
            is_ok = status.state is CameraState.LIVE
            reason, text = pipeline.fault
            calibration = pipeline.calibration
            response.cameras.add(
                name=camera.name,
                state="ok" if is_ok else status.state.value,
                reason=reason,
                text=as_utf8(text),
                model=as_utf8(pipeline.model),
                calibration=None if calibration is None else calibration_message(calibration),
            )
        return response

    def SetVehicleState(self, request: Any) -> Any:
        self._sources.vehicle.put(vehicle_state(request, self._now_ns()))
        return pb.SetVehicleStateResponse()

    def Record(self, request: Any) -> Any:
        if len(request.cause) > _LONGEST_CAUSE:
            raise InvalidRequest(
                f"cause has {len(request.cause)} characters: it is part of the file's name and of "
                f"its metadata, with {_LONGEST_CAUSE} at most"
            )
        times: list[float | None] = []
        for name, most in (("before_s", 60.0), ("after_s", 300.0)):
            value = getattr(request, name) if request.HasField(name) else None
            if value is not None and not 0 <= value <= most:
                raise InvalidRequest(f"{name} is {value:g}: it is 0 to {most:g}, in seconds")
            times.append(value)
        if self._sources.record is None:
            raise Unavailable("the recorder is off; set recorder.mode to events or continuous")
        return pb.RecordResponse(file=self._sources.record(request.cause, *times))

    @contextmanager
    def _opened(self, context: Any) -> Iterator[list[Callable[[], object]]]:
        """Hold a stream's place for the block, also before its first request has arrived.

        Yields a list whose last entry is called once the server closes.
        """
        when_closed: list[Callable[[], object]] = [context.cancel]

        def closed() -> None:
            when_closed[-1]()

        with self._streams.stream(closed):
            yield when_closed

    def _refuse_unknown(self, cameras: Sequence[str]) -> None:
        pipelines = tuple(self._sources.pipelines)
        known = [pipeline.camera.name for pipeline in pipelines if pipeline.model]
        for name in cameras:
            if name not in known:
                there = ", ".join(known) or "none"
                raise NotFound(
                    f"no camera '{name}' with lanes is in the settings; there are: {there}"
                )


def too_many_lane_streams(streams: int) -> LimitReached:
    return LimitReached(
        f"{streams} streams of lanes, events, reflection and health are open already "
        "(grpc.max_lane_streams); try again when one ends"
    )


def _ending() -> Unavailable:
    return Unavailable(SHUTTING_DOWN)


def _parse(request: bytes | None, kind: Any) -> Any:
    if request is None:
        raise InvalidRequest(f"the call ended without a {kind.DESCRIPTOR.name}")
    return parsing(kind)(request)


def _read_acknowledgements(requests: Iterator[bytes], reader: LaneReader, kind: Any) -> None:
    try:
        for data in requests:
            _acknowledge(_parse(data, kind), reader)
        reader.acknowledge_no_more()
    except InvalidRequest as error:
        reader.end(error)
    except grpc.RpcError:
        # gRPC raises this when the call is over.
        reader.end()


def _acknowledge(request: Any, reader: LaneReader) -> None:
    if any(field.name != "acknowledged" for field, _ in request.ListFields()):
        of = request.DESCRIPTOR.fields[0].name
        raise InvalidRequest(f"only a stream's first request chooses {of}, max_hz and window")
    if not reader.acknowledge(request.acknowledged):
        raise InvalidRequest(
            f"response {request.acknowledged} is acknowledged, and was not sent yet"
        )
