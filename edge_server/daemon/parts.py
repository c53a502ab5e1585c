"""Parts of the daemon, made as the settings have them."""

from __future__ import annotations

import math
import os
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.board.board import is_jetson
from edge_server.board.installation import missing
from edge_server.board.resources import nearest_directory
from edge_server.board.watch import CLOCK_UNSYNCHRONIZED
from edge_server.errors import SettingsError
from edge_server.gpu.device import Devices
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.inference.data_plane import BoundedControl, DataPlane, LiveModels
from edge_server.inference.line import RateLimiter, ResourceLimit
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.statistics import LatencyMetrics
from edge_server.lanes.departure import DepartureRule
from edge_server.lifecycle.build import Build, MemoryBudget
from edge_server.lifecycle.control import RepositoryControl
from edge_server.lifecycle.fit import InterfaceRule
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.poll import PollControl
from edge_server.lifecycle.records import AcceptedCopies, Deployments, ModelTable
from edge_server.model_config.config import Completion
from edge_server.pipeline.contracts import check_replacement
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.pipeline.road_follower import LaneLocator, RoadEvents, RoadFollower
from edge_server.process.disk import cache_directory, free_bytes, state_directory
from edge_server.process.text import is_utf8, shown
from edge_server.repository.channel import ChannelFollower, Surroundings
from edge_server.repository.content import PrivateCopies, PrivateDirectory
from edge_server.repository.manifest import PublicKeys, SignaturePolicy
from edge_server.repository.scan import Repositories
from edge_server.repository.store import ModelStore
from edge_server.settings import Metrics, Python, Serving

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from edge_server.board.board import Identity
    from edge_server.board.watch import BoardWatch
    from edge_server.cameras.calibration import Calibration
    from edge_server.inference.otlp import SpanSender
    from edge_server.lifecycle.loader import ModelSource
    from edge_server.pipeline.recorder.recorder import Recorder
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.repository.channel import ChannelReport
    from edge_server.settings import ChannelSection, Repository, Settings

# A model that loads others waits in a thread of its own, and the loaded ones may load others.
_LOADS_BY_MODELS = 16
_ANY_PYTHON = Python()
_ANY_METRICS = Metrics()
_ANY_SERVING = Serving()
# For the models of `models_aside`.
_CLOSE_S = 5.0
# A slower vehicle stands; a wheel's sensor gives nothing below.
_STANDS_MPS = 0.1
# Unpacking a large model is the longest pause between two looks at the vehicle.
_LOOKS_S = 60.0


def chosen_scheduling(settings: Serving, metrics: Metrics = _ANY_METRICS) -> Scheduling:
    """Return the scheduling resources that the schedulers of all models share.

    Raises:
        SettingsError: see `RateLimiter`.
    """
    limiter = None
    if settings.rate_limit != "off":
        limiter = RateLimiter(
            [
                ResourceLimit(each.name, each.count, each.device if each.device >= 0 else None)
                for each in settings.rate_limit_resources
            ]
        )
    kept = LatencyMetrics(
        metrics.counter_latencies,
        metrics.enabled and metrics.summary_latencies,
        metrics.enabled and metrics.histogram_latencies,
        metrics.summary_quantiles,
    )
    return Scheduling(limiter, settings.cache_bytes, kept)


def chosen_completion(settings: Repository, devices: Devices, python: Python) -> Completion:
    """Return the defaults for model configurations and the Python models' access, of this host."""
    return Completion(
        settings.auto_complete,
        settings.default_max_batch_size,
        devices.count,
        devices.reason,
        python,
        settings.config_name,
        is_jetson(),
    )


def python_of(settings: Settings) -> Python:
    """Return the paths and sockets open to Python models, without the daemon's own files."""
    private = (
        str(store_directory(settings.repository)),
        str(state_directory()),
        settings.grpc.tls.key,
        settings.http.tls.key,
        settings.access.tokens_file or "",
        settings.grpc.socket or "",
        (settings.mqtt.password_file if settings.mqtt else None) or "",
        *(camera.credentials_file or "" for camera in settings.cameras.values()),
        *settings.python.private,
    )
    unix_sockets = settings.python.unix_sockets
    return msgspec.structs.replace(
        settings.python,
        private=tuple(path for path in private if path),
        unix_sockets=not settings.grpc.socket if unix_sockets is None else unix_sockets,
    )


def chosen_control(
    registry: ModelRegistry,
    scheduling: Scheduling,
    devices: Devices,
    settings: Repository,
    *,
    python: Python = _ANY_PYTHON,
    camera_models: Collection[str] = (),
) -> RepositoryControl:
    """Return the control that loads models into `registry`, at the start and on request.

    In mode `poll` this control only loads the models present at the start.

    Args:
        python: see `python_of`.
        camera_models: names of the models of cameras; read at each load, so it may change.
    """
    server_context, private = LiveModels(registry), PrivateDirectory()
    control = RepositoryControl(
        _loader(
            Build(scheduling, None, devices, server_context),
            ModelTable(registry),
            Repositories(_paths(settings), PrivateCopies(private).copy),
            settings,
            signatures=chosen_signatures(settings),
            completion=chosen_completion(settings, devices, python),
            camera_models=camera_models,
        ),
        explicit=settings.mode == "explicit",
        load=settings.load,
        # The daemon starts anew when the GPU comes.
        exit_on_error=settings.exit_on_error and not devices.awaited,
        private=private,
    )
    server_context.control = BoundedControl(control, _LOADS_BY_MODELS)
    return control


@contextmanager
def models_aside(
    settings: Repository, serving: Serving = _ANY_SERVING, python: Python = _ANY_PYTHON
) -> Iterator[tuple[RepositoryControl, DataPlane]]:
    """Yield a control and a data plane of models that nothing else uses, closed at the end."""
    registry, devices, scheduling = ModelRegistry(), Devices(), chosen_scheduling(serving)
    control = chosen_control(registry, scheduling, devices, settings, python=python)
    try:
        yield control, DataPlane(registry)
    finally:
        control.close(_CLOSE_S)
        scheduling.close()
        devices.close()


def _paths(settings: Repository) -> list[Path]:
    """Raises: SettingsError: a path is not UTF-8."""
    for path in settings.paths:
        if not is_utf8(path):
            raise SettingsError(f"repository.paths: {shown(path)}: is not UTF-8; rename it")
    return [Path(path) for path in settings.paths]


def store_directory(settings: Repository) -> Path:
    return Path(settings.store) if settings.store else state_directory() / "store"


def chosen_signatures(settings: Repository) -> SignaturePolicy:
    """Raises: SettingsError: see `SignaturePolicy`."""
    return SignaturePolicy(settings.signatures, [Path(path) for path in settings.signature_keys])


def following_control(
    registry: ModelRegistry,
    scheduling: Scheduling,
    devices: Devices,
    settings: Repository,
    *,
    python: Python = _ANY_PYTHON,
    camera_models: Collection[str] = (),
) -> PollControl:
    """Return the control that keeps `registry` like the repositories; see `chosen_control`."""
    paths = _paths(settings)
    signatures = chosen_signatures(settings)
    store = ModelStore(
        store_directory(settings),
        most_bytes=settings.store_max_bytes,
        reserve_bytes=settings.disk_reserve_bytes,
        signatures=signatures,
        repositories=paths,
    )
    deployments = Deployments(registry, store, paths)
    budget = MemoryBudget(settings.memory_reserve_bytes)
    return PollControl(
        _loader(
            # No request loads a model.
            Build(scheduling, budget, devices, LiveModels(registry)),
            deployments,
            AcceptedCopies(deployments),
            settings,
            signatures=signatures,
            completion=chosen_completion(settings, devices, python),
            camera_models=camera_models,
            terms=CanaryTerms(settings.probation_requests, settings.probation_s),
        ),
        deployments,
        paths,
        poll_s=settings.poll_s,
        settle_s=settings.settle_s,
        # The daemon starts anew when the GPU comes.
        exit_on_error=settings.exit_on_error and not devices.awaited,
    )


def _loader(
    build: Build,
    table: ModelTable,
    source: ModelSource,
    settings: Repository,
    *,
    signatures: SignaturePolicy,
    completion: Completion,
    camera_models: Collection[str],
    terms: CanaryTerms | None = None,
) -> RepositoryLoader:
    lifecycle = ModelLifecycle(
        table,
        build,
        terms if settings.probation_requests else None,
        take_down=settings.incompatible_member == "take_down",
        interface=InterfaceRule(camera_models, check_replacement),
    )
    return RepositoryLoader(
        lifecycle,
        source,
        completion=completion,
        load_threads=settings.load_threads,
        load_retries=settings.load_retries,
        signatures=signatures,
        kept=camera_models,
    )


class KnownSurroundings:
    """What the daemon knows of its vehicle, for channels; safe from any thread.

    How long the vehicle stands counts from look to look: after a pause it begins anew.
    """

    def __init__(self, vehicle: VehicleInputs, board: BoardWatch) -> None:
        self._vehicle, self._board = vehicle, board
        self._stands_since = self._looked_at = math.inf

    def look(self) -> Surroundings:
        now, state, device = time.monotonic(), self._vehicle.at(), self._board.latest
        speed_mps = None if state is None else state.speed_mps
        stands = speed_mps is not None and abs(speed_mps) < _STANDS_MPS
        if not stands or now - self._looked_at > _LOOKS_S:
            self._stands_since = math.inf
        self._stands_since = min(self._stands_since, now) if stands else math.inf
        self._looked_at = now
        hottest = None if device.facts is None else device.facts.heat.hottest
        is_right = all(each.code != CLOCK_UNSYNCHRONIZED for each in device.reasons)
        return Surroundings(
            datetime.now(timezone.utc) if is_right else None,
            None if speed_mps is None else max(0.0, now - self._stands_since),
            None if hottest is None else hottest.celsius,
        )


def channel_followers(
    settings: Settings,
    control: RepositoryControl,
    surroundings: KnownSurroundings,
    events: EventLog,
) -> list[ChannelFollower]:
    """Return what follows the channels of the settings.

    Raises:
        SettingsError: a key cannot be read, or a library is missing.
    """
    if not settings.repository.channels or not isinstance(control, PollControl):
        return []

    def put(cause: str, report: ChannelReport) -> None:
        text = f"channel {report.channel}, serial {report.serial}, {report.content[:12]}"
        if detail := report.fault if cause == "index_refused" else report.reason:
            text = f"{text}: {detail}"
        cause, times = f"channel_{cause}", (time.monotonic_ns(), time.time_ns())
        events.put(Event("model", "instant", cause, text, *times, model=report.model))

    for name, each in settings.repository.channels.items():
        check_channel(name, each)
    return [
        ChannelFollower(
            *(name, each.source, [Path(path) for path in each.keys], settings.device.id),
            interval_s=each.interval_s,
            ca_file=each.ca_file,
            repositories=_paths(settings.repository),
            cache=cache_directory() / "channels" / name,
            marks=control.deployments.store,
            surroundings=surroundings.look,
            verdict=control.deployments.verdict,
            on_news=put,
        )
        for name, each in settings.repository.channels.items()
    ]


def check_channel(name: str, section: ChannelSection) -> None:
    """Raises: SettingsError: a key of the channel cannot be read, or a library is missing."""
    PublicKeys([Path(path) for path in section.keys])
    try:
        import_module("oras.container")
    except ModuleNotFoundError as error:
        raise SettingsError(f"repository.channels.{name}: the library {missing(error)}") from error


def event_log(settings: Settings) -> EventLog:
    """Return the log of events.

    Raises:
        SettingsError, Unavailable: its file cannot be made.
    """
    file, kept = settings.events.file, settings.events.kept
    if file is not None:
        return EventLog(Path(file), kept=kept)
    # Daemons that a person starts may share the user's directory.
    of_systemd = "STATE_DIRECTORY" in os.environ
    if not of_systemd:
        return EventLog(None, kept=kept)
    path, earlier = state_directory() / "events.jsonl", state_directory() / "events.db"
    if earlier.exists() and not path.exists():
        # Of an earlier version: it is set aside, and ids go on above those that it may have given.
        with suppress(OSError):
            earlier.rename(path)
    return EventLog(path, kept=kept)


def check_recorder(settings: Settings) -> None:
    """Check the settings of the recorder.

    Raises:
        SettingsError: a library is missing, or a camera that it shall record.
    """
    section = settings.recorder
    unknown = [name for name in section.cameras if name not in settings.cameras]
    if unknown:
        raise SettingsError(f"recorder.cameras: there is no camera {unknown[0]!r}")
    try:
        import_module("edge_server.pipeline.recorder.recorder")
    except ModuleNotFoundError as error:
        raise SettingsError(f"recorder.mode: the library {missing(error)}") from error


def recorder_of(
    settings: Settings,
    identity: Identity,
    events: EventLog,
    calibration: Callable[[str], Calibration | None],
) -> Recorder | None:
    """Return the recorder; None where it is off.

    Raises:
        SettingsError, Unavailable: a library is missing, or the directory cannot be used.
    """
    section = settings.recorder
    if section.mode == "off":
        return None
    check_recorder(settings)
    from edge_server.pipeline.recorder.recorder import Recorder  # noqa: PLC0415 -- optional
    from edge_server.pipeline.recorder.recording_writer import RecordingFiles  # noqa: PLC0415 -- likewise

    files = RecordingFiles(
        Path(section.directory) if section.directory else state_directory() / "recordings",
        identity.boot_id,
        most_bytes=section.max_bytes,
        reserve_bytes=settings.repository.disk_reserve_bytes,
    )
    return Recorder(section, files, identity, events, calibration)


def road_follower(
    settings: Settings, calibration: Calibration, vehicle: VehicleInputs, events: EventLog
) -> RoadFollower:
    """Return what follows the road through the frames of a camera with `calibration`."""
    half_width_m = settings.vehicle.width_m / 2
    departure = settings.lane_departure
    rule = DepartureRule(
        half_width_m,
        departure.time_to_line_s,
        slowest_mps=departure.min_speed_mps,
        warns=departure.enabled,
    )
    locator = LaneLocator(calibration)
    return RoadFollower(locator, vehicle, RoadEvents(events, rule), half_width_m)


def directories_of(settings: Settings) -> list[Path]:
    """Return the directories that the daemon writes to."""
    found = [state_directory()]
    if settings.repository.mode == "poll":
        found.append(store_directory(settings.repository))
    if settings.recorder.mode != "off" and settings.recorder.directory:
        found.append(Path(settings.recorder.directory).absolute())
    if settings.trace.file:
        found.append(Path(settings.trace.file).absolute().parent)
    return found


def free_space(directories: Sequence[Path]) -> dict[str, int]:
    """Return the free space of each directory, or of where it would be made."""
    found = {}
    for directory in directories:
        with suppress(OSError):
            found[str(directory)] = free_bytes(nearest_directory(directory))
    return found


def span_sender(settings: Settings, identity: Identity) -> SpanSender | None:
    """Return the sender of spans to a collector; None where tracing is off.

    Raises:
        SettingsError: OpenTelemetry's SDK or its exporter is not installed.
    """
    tracing = settings.tracing
    if not tracing.enabled:
        return None
    try:
        from edge_server.inference import otlp  # noqa: PLC0415 - only where tracing is on
    except ModuleNotFoundError as error:
        raise SettingsError(
            "tracing.enabled: OpenTelemetry's exporter is not installed; install it (pip "
            "install 'edge-server[tracing]'), or set enabled = false"
        ) from error
    about = {
        "service.name": "edge-server",
        "service.version": identity.version,
        "service.instance.id": identity.device,
    }
    rate = settings.trace.rate
    share = (rate and 1 / rate) if tracing.sample is None else tracing.sample
    return otlp.SpanSender(tracing, share, about)
