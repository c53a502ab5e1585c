"""What the daemon is made of, in three steps: models, what answers requests, what makes lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_server.api.access import AccessRules, Tokens
from edge_server.api.grpc.server import GrpcServer
from edge_server.api.http.page.state import PictureWriter
from edge_server.api.http.rest.api import LOADS_AT_ONCE, RestApi, gate_and_threads
from edge_server.api.parameters import HeaderForwarding
from edge_server.api.shared_memory import SharedMemory
from edge_server.api.triton_calls import TritonCalls
from edge_server.board.board import is_jetson
from edge_server.board.device_nodes import gpu_files
from edge_server.board.watch import BoardWatch, ClockWatch
from edge_server.daemon.camera_set import CameraSet
from edge_server.daemon.parts import (
    chosen_control,
    chosen_scheduling,
    event_log,
    following_control,
    python_of,
    recorder_of,
    road_follower,
    span_sender,
)
from edge_server.daemon.reload import check_broker, trace_rule
from edge_server.daemon.status import LaneRate
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import BoundedControl, DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.tracing import TraceFile, Tracer, TraceWriter
from edge_server.mqtt.publisher import Publisher
from edge_server.pipeline.lane_feed import LaneFeed, LaneLatency
from edge_server.pipeline.picture_feed import PictureFeed
from edge_server.pipeline.vehicle import VehicleInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.api.calls import RequestMetrics
    from edge_server.board.board import Identity
    from edge_server.cameras.calibration import Calibration
    from edge_server.errors import Reason
    from edge_server.inference.otlp import SpanSender
    from edge_server.inference.scheduling import Scheduling
    from edge_server.lifecycle.control import RepositoryControl
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.lane_pipeline import Listener
    from edge_server.pipeline.networks import NetworkListener
    from edge_server.pipeline.recorder.recorder import Recorder
    from edge_server.process.logs import LogSwitches
    from edge_server.settings import Settings


@dataclass(frozen=True)
class Inference:
    """The models, and what loads, schedules and traces them.

    Attributes:
        camera_models: names of the models of cameras; the cameras fill it.
    """

    devices: Devices
    data_plane: DataPlane
    scheduling: Scheduling
    control: RepositoryControl
    camera_models: set[str]
    traces: TraceWriter | None
    spans: SpanSender | None
    tracer: Tracer


def build_inference(settings: Settings, identity: Identity) -> Inference:
    repository, trace = settings.repository, settings.trace
    registry, devices = ModelRegistry(), Devices(gpu_files if is_jetson() else None)
    scheduling = chosen_scheduling(settings.serving, settings.metrics)
    camera_models: set[str] = set()
    make_control = following_control if repository.mode == "poll" else chosen_control
    control = make_control(
        registry,
        scheduling,
        devices,
        repository,
        python=python_of(settings),
        camera_models=camera_models,
    )
    traces = TraceWriter(TraceFile(trace.file)) if trace.file else None
    spans = span_sender(settings, identity)
    return Inference(
        devices,
        DataPlane(registry, strict_readiness=repository.strict_readiness),
        scheduling,
        control,
        camera_models,
        traces,
        spans,
        Tracer(trace_rule(trace), traces, spans),
    )


@dataclass(frozen=True)
class Requests:
    """What answers the requests of clients; the port of gRPC is open."""

    grpc: GrpcServer
    rest: RestApi
    tokens: Tokens | None
    counts: RequestMetrics


def build_requests(
    settings: Settings, identity: Identity, inference: Inference, log_switches: LogSwitches
) -> Requests:
    serving, grpc, http = settings.serving, settings.grpc, settings.http
    tokens = Tokens(settings.access.tokens_file) if settings.access.tokens_file else None
    shared_memory = None
    if serving.client_shared_memory:
        shared_memory = SharedMemory(longest_bytes=grpc.max_message_bytes)
    calls = TritonCalls(
        inference.data_plane,
        serving.name,
        identity.version,
        inference.control,
        shared_memory,
        inference.tracer,
        log_switches,
    )
    server = GrpcServer(calls, grpc, tokens=tokens, max_inferences=serving.max_inferences)
    rest = RestApi(
        replace(calls, control=BoundedControl(inference.control, LOADS_AT_ONCE)),
        AccessRules.of_http(http, grpc, tokens),
        *gate_and_threads(serving.max_inferences),
        HeaderForwarding(http.forward_headers, (each.header for each in http.restricted)),
        http.max_body_bytes,
    )
    return Requests(server, rest, tokens, calls.requests)


@dataclass(frozen=True)
class Lanes:
    """The cameras, and all that takes their lanes: broker, streams, page, metrics, recorder."""

    board: BoardWatch
    vehicle: VehicleInputs
    events: EventLog
    publisher: Publisher
    feed: LaneFeed
    networks: LaneFeed
    pictures: PictureFeed
    latency: LaneLatency
    rate: LaneRate
    recorder: Recorder | None
    cameras: CameraSet


def build_lanes(
    settings: Settings,
    identity: Identity,
    inference: Inference,
    listeners: Sequence[Listener],
    faults: Callable[[], Sequence[Reason]],
    *,
    network_listeners: Sequence[NetworkListener] = (),
) -> Lanes:
    """Return the cameras and their listeners.

    Args:
        faults: which auxiliary parts of the daemon do not work; degrades all lanes.
    """
    # Later a file may be absent while it is replaced; at the start that is a mistake.
    check_broker(settings)
    vehicle, events = VehicleInputs(), event_log(settings)
    publisher = Publisher(settings.mqtt, identity, events=events, vehicle=vehicle)
    feed, networks = LaneFeed(identity), LaneFeed(identity)
    pictures = PictureFeed(PictureWriter(identity, networks))
    latency = LaneLatency()
    rate = LaneRate(latency.frames)
    clock = ClockWatch(required=settings.device.clock == "synchronized")
    board = BoardWatch(clock=clock, parts=faults)

    def calibration_of_camera(name: str) -> Calibration | None:
        return cameras.calibration(name)

    recorder = recorder_of(settings, identity, events, calibration_of_camera)

    def forget_camera(name: str) -> None:
        latency.forget(name)
        feed.forget(name)
        networks.forget(name)

    cameras = CameraSet(
        settings.cameras,
        inference.data_plane,
        (*listeners, publisher.publish_lanes, feed, latency),
        inference.camera_models,
        forget_camera,
        holds=(publisher.holds, feed.holds, *(() if recorder is None else (recorder.holds,))),
        board=board,
        tracer=None if inference.spans is None else inference.tracer,
        road=lambda calibration: road_follower(settings, calibration, vehicle, events),
        frame_listeners=(pictures, *(() if recorder is None else (recorder,))),
        network_listeners=(*network_listeners, publisher.publish_lanes, networks),
        network_recorder=recorder,
    )
    return Lanes(
        board,
        vehicle,
        events,
        publisher,
        feed,
        networks,
        pictures,
        latency,
        rate,
        recorder,
        cameras,
    )
