"""What two samples of the daemon, its settings and the board say, as people want to know it."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from edge_server.api.grpc.client import DaemonClient
from edge_server.api.http.scrape import scrape
from edge_server.board.resources import listed
from edge_server.cli.run import REMEDY
from edge_server.errors import EdgeServerError, SettingsError, Unavailable
from edge_server.inference.registry import UNLOADED
from edge_server.process.disk import states_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from edge_server.api.http.scrape import Scrape
    from edge_server.board.board import Board
    from edge_server.settings import Metrics, Settings


@dataclass(frozen=True)
class DaemonSample:
    """What the daemon reported; what it did not report is empty, and `faults` says why.

    Attributes:
        at_s: `time.monotonic`.
        index: `ModelIndex` messages; `statistics`: `ModelStatistics`; `cameras`: LaneService's.
        backends: model → its backend, of those that are loaded.
        lanes: camera → its newest `LaneFrame` message; None before the first frame.
    """

    at_s: float
    ready: bool | None = None
    metrics: Scrape | None = None
    index: Sequence[Any] | None = None
    statistics: Sequence[Any] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    cameras: Sequence[Any] | None = None
    lanes: Mapping[str, Any | None] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


@contextmanager
def sampling(settings: Settings) -> Iterator[Callable[[], DaemonSample]]:
    """Yield what samples the daemon over one connection, which is made again after a restart."""
    with ExitStack() as stack:
        try:
            client: DaemonClient | str = stack.enter_context(DaemonClient(settings.grpc))
        except SettingsError as error:
            # The metrics say much without it.
            client = str(error)
        yield partial(_sample, settings.metrics, client)


def _sample(section: Metrics, client: DaemonClient | str) -> DaemonSample:
    """Return what the daemon reports now; of a `client` that cannot be made there is the reason.

    Raises:
        Unavailable: it responds neither over gRPC nor with metrics; the text has the remedy.
    """
    faults = []
    metrics = None
    found: dict[str, Any] = {}
    if section.enabled and section.port:
        try:
            metrics = scrape(section.host, section.port)
        except Unavailable as error:
            faults.append(str(error))
    else:
        faults.append("metrics are off: set enabled = true and a port in [metrics]")
    if isinstance(client, str):
        faults.append(client)
    else:
        try:
            found["ready"] = client.is_ready()  # needs no token
            found |= _over_grpc(client)
        except EdgeServerError as error:
            faults.append(f"gRPC at {client.target}: {error}")
    if metrics is None and not found:
        raise Unavailable("\n".join([*faults, REMEDY]))
    return DaemonSample(time.monotonic(), metrics=metrics, faults=tuple(faults), **found)


def _over_grpc(client: DaemonClient) -> dict[str, Any]:
    index = client.index()
    configs = {each.name: client.config(each.name) for each in index if each.state == "READY"}
    cameras = client.cameras()
    return {
        "index": index,
        "statistics": client.statistics(),
        "backends": {name: str(each.backend or each.platform) for name, each in configs.items()},
        "cameras": cameras,
        "lanes": {each.name: client.latest_lanes(each.name) for each in cameras},
    }


@dataclass(frozen=True)
class ModelReport:
    """One version of a model; numbers are None where it is not loaded, or had no request.

    Attributes:
        reason: why its state is not READY, or what a READY one responds without; of a LOADING one,
            how far its plan is.
        devices: that it runs on; empty where metrics cannot be read, and of an ensemble.
        memory_bytes: what is known of its memory, by kind (see `MemoryKind`); None where metrics
            cannot be read.
        degraded: this machine should serve another configuration; `reason` says why it does not.
        requests: successful ones since it was loaded; likewise `failed`.
        per_s: successful requests between the samples; `mean_ms` to `infer_ms` are means of these.
    """

    name: str
    version: str
    state: str
    reason: str
    backend: str = ""
    devices: str = ""
    memory_bytes: Mapping[str, float] | None = None
    degraded: bool = False
    requests: int | None = None
    failed: int | None = None
    per_s: float | None = None
    mean_ms: float | None = None
    queue_ms: float | None = None
    infer_ms: float | None = None


@dataclass(frozen=True)
class CameraReport:
    """One camera; numbers are None where they are not known.

    Attributes:
        state: `ok`, or as LaneService spells it.
        fps: frames that came between the samples, per second.
        lanes_per_s: frames that got lanes.
        lanes: number of lanes in the newest frame, and `status` of that frame in a word.
        age_ms: of the newest frame.
        mean_ms: from capture until the lanes were known.
        dropped: frames without lanes since the start.
    """

    name: str
    state: str
    reason: str
    text: str
    model: str
    fps: float | None = None
    lanes_per_s: float | None = None
    lanes: int | None = None
    status: str = ""
    age_ms: float | None = None
    mean_ms: float | None = None
    dropped: int | None = None


@dataclass(frozen=True)
class BrokerReport:
    """The daemon's broker; None is not known, as metrics cannot be read.

    Attributes:
        address: as the settings here have it; empty where they name none.
    """

    address: str
    connected: bool | None = None
    waiting: int | None = None
    dropped: int | None = None


@dataclass(frozen=True)
class BoardReport:
    """The machine; None is not known.

    Attributes:
        conditions: why lanes are degraded now: throttled, undervoltage, …
        watts: of all rails, or of the board's input where there is such a rail.
        free_bytes: directory → free space, where the daemon writes.
    """

    model: str | None = None
    conditions: tuple[str, ...] = ()
    clock: str = ""
    power_mode: str | None = None
    cpu_load: float | None = None
    gpu_load: float | None = None
    gpu_hz: int | None = None
    hottest: str | None = None
    celsius: float | None = None
    watts: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    free_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlansReport:
    """TensorRT plans: the models that run one, and what was built on this machine."""

    models: tuple[str, ...] = ()
    built: int = 0
    built_bytes: int = 0


@dataclass(frozen=True)
class RecorderReport:
    """The recorder; `mode` is None where metrics cannot be read, and `ok` where it is off too.

    Attributes:
        mode: as the settings here have it; `on` where they do not know.
    """

    mode: str | None = None
    ok: bool | None = None
    written_bytes: int = 0
    dropped: int = 0
    lost: int = 0


@dataclass(frozen=True)
class SettingsReport:
    """The last reload of the settings; None where they are never read again.

    Attributes:
        reloaded: it was not refused.
        restart_needed: number of settings that wait for a restart.
    """

    reloaded: bool | None = None
    restart_needed: int | None = None


@dataclass(frozen=True)
class FollowedChannel:
    """A channel: `trouble` is a word for what a person should look at, empty without."""

    name: str
    serial: int
    state: str
    trouble: str


@dataclass(frozen=True)
class DaemonReport:
    """All of one screen.

    Attributes:
        version: of the daemon that runs; None where metrics cannot be read.
        installed: of this program: where it differs, the daemon waits for a restart.
        ready, models, cameras: None where gRPC does not respond, or refuses to list them.
    """

    version: str | None
    installed: str
    uptime_s: float | None
    ready: bool | None
    models: tuple[ModelReport, ...] | None
    cameras: tuple[CameraReport, ...] | None
    broker: BrokerReport | None
    board: BoardReport
    plans: PlansReport
    recorder: RecorderReport
    settings: SettingsReport
    channels: tuple[FollowedChannel, ...] = ()
    faults: tuple[str, ...] = ()


def make_report(
    before: DaemonSample, now: DaemonSample, settings: Settings, board: Board
) -> DaemonReport:
    """Return the report at `now`; rates are those since `before`."""
    metrics = now.metrics
    builds = [] if metrics is None else metrics.labels("edge_build_info", 1)
    return DaemonReport(
        version=builds[0].get("version") if builds else None,
        installed=version("edge-server"),
        uptime_s=None if metrics is None else metrics.value("edge_uptime_seconds"),
        ready=now.ready,
        models=_models(before, now),
        cameras=_cameras(before, now),
        broker=_broker(settings, metrics),
        board=_board(board, metrics),
        plans=_plans(now.backends),
        recorder=_recorder(settings, metrics),
        settings=_settings(metrics),
        channels=() if metrics is None else _channels(metrics),
        faults=now.faults,
    )


def _models(before: DaemonSample, now: DaemonSample) -> tuple[ModelReport, ...] | None:
    if now.index is None:
        return None
    seconds = now.at_s - before.at_s
    earlier = {(each.name, each.version): each for each in before.statistics}
    counted = {(each.name, each.version): each for each in now.statistics}
    reports = []
    for entry in sorted(now.index, key=lambda each: (each.name, each.version)):
        if entry.reason == UNLOADED:
            continue
        key = (entry.name, entry.version)
        numbers: dict[str, Any] = {}
        if key in counted:
            numbers = _rates(earlier.get(key), counted[key], seconds)
        if now.metrics is not None:
            numbers |= _placed(now.metrics, *key)
        backend = now.backends.get(entry.name, "")
        reports.append(
            ModelReport(entry.name, entry.version, entry.state, entry.reason, backend, **numbers)
        )
    return tuple(reports)


def _placed(metrics: Scrape, model: str, version: str) -> dict[str, Any]:
    of_it = {"model": model, "version": version}
    numbers: dict[str, Any] = {
        "memory_bytes": metrics.by_label("edge_model_memory_bytes", "kind", **of_it)
    }
    for is_chosen in (False, True):
        for labels in metrics.labels("edge_model_configuration", int(is_chosen), **of_it)[:1]:
            return {**numbers, "devices": labels["devices"], "degraded": not is_chosen}
    return numbers


def _rates(before: Any | None, now: Any, seconds: float) -> dict[str, Any]:
    stats = now.inference_stats
    numbers = {"requests": stats.success.count, "failed": stats.fail.count}
    # A version that was loaded anew counts from 0.
    if before is None or before.inference_stats.success.count > stats.success.count or not seconds:
        return numbers
    earlier = before.inference_stats
    count = stats.success.count - earlier.success.count

    def mean_ms(name: str) -> float | None:
        duration_ns = getattr(stats, name).ns - getattr(earlier, name).ns
        return duration_ns / count / 1e6 if count else None

    return {
        **numbers,
        "per_s": count / seconds,
        "mean_ms": mean_ms("success"),
        "queue_ms": mean_ms("queue"),
        "infer_ms": mean_ms("compute_infer"),
    }


def _cameras(before: DaemonSample, now: DaemonSample) -> tuple[CameraReport, ...] | None:
    if now.cameras is None:
        return None
    reports = []
    for camera in now.cameras:
        frame = now.lanes.get(camera.name)
        numbers = _camera_numbers(camera.name, before, now)
        if not camera.model:  # its frames go to its networks alone
            numbers.pop("lanes_per_s", None)
        if frame is not None:
            numbers["lanes"] = len(frame.lanes)
            # FRAME_STATUS_OK is 1.
            name = type(frame).DESCRIPTOR.fields_by_name["status"].enum_type
            word = name.values_by_number[frame.status].name
            numbers["status"] = word.removeprefix("FRAME_STATUS_").lower()
        reports.append(
            CameraReport(
                camera.name, camera.state, camera.reason, camera.text, camera.model, **numbers
            )
        )
    return tuple(reports)


def _camera_numbers(camera: str, before: DaemonSample, now: DaemonSample) -> dict[str, Any]:
    metrics, earlier = now.metrics, before.metrics
    if metrics is None:
        return {}
    age_s = metrics.value("edge_camera_last_frame_age_seconds", camera=camera)
    numbers: dict[str, Any] = {
        "age_ms": None if age_s is None else 1e3 * age_s,
        "dropped": int(metrics.total("edge_frames_dropped_total", camera=camera)),
    }
    seconds = now.at_s - before.at_s
    if earlier is None or not seconds:
        return numbers

    def more(name: str) -> float:
        return metrics.total(name, camera=camera) - earlier.total(name, camera=camera)

    frames = more("edge_frames_total")
    lanes = more("edge_end_to_end_latency_seconds_count")
    if frames < 0 or lanes < 0:  # the daemon was restarted
        return numbers
    numbers |= {"fps": frames / seconds, "lanes_per_s": lanes / seconds}
    if lanes:
        numbers["mean_ms"] = 1e3 * more("edge_end_to_end_latency_seconds_sum") / lanes
    return numbers


def _broker(settings: Settings, metrics: Scrape | None) -> BrokerReport | None:
    mqtt = settings.mqtt
    address = "" if mqtt is None else f"{mqtt.host}:{mqtt.port}"
    if metrics is None:
        return BrokerReport(address)
    connected = metrics.value("edge_mqtt_connected")
    if connected is None:
        return None
    return BrokerReport(
        address,
        bool(connected),
        int(metrics.value("edge_mqtt_queue_depth") or 0),
        int(metrics.value("edge_mqtt_dropped_total") or 0),
    )


def _board(board: Board, metrics: Scrape | None) -> BoardReport:
    found: dict[str, Any] = {"model": board.model}
    if (facts := board.facts) is not None:
        gpu = next((each for each in facts.engines if each.name == "gpu"), None)
        hottest = facts.heat.hottest
        # VDD_IN is the whole of an Orin NX or Nano.
        whole = [rail for rail in facts.rails if rail.name == "VDD_IN"] or facts.rails
        found |= {
            "power_mode": facts.power_mode,
            "gpu_load": None if gpu is None else gpu.load,
            "gpu_hz": None if gpu is None else gpu.now_hz,
            "hottest": None if hottest is None else hottest.name,
            "celsius": None if hottest is None else hottest.celsius,
            "watts": sum(rail.watts for rail in whole) if whole else None,
            "memory_total_bytes": facts.memory.total_bytes,
            "memory_available_bytes": facts.memory.available_bytes,
        }
    if metrics is not None:
        conditions = metrics.labels("edge_board_condition", 1)
        clocks = metrics.labels("edge_board_clock_state", 1)
        free = metrics.by_label("edge_disk_free_bytes", "directory")
        found |= {
            "conditions": tuple(each.get("reason", "") for each in conditions),
            "clock": clocks[0].get("state", "") if clocks else "",
            "cpu_load": metrics.value("nv_cpu_utilization"),
            "free_bytes": {directory: int(count) for directory, count in free.items()},
        }
    return BoardReport(**found)


def _plans(backends: Mapping[str, str]) -> PlansReport:
    models = tuple(name for name, backend in backends.items() if backend == "tensorrt")
    plans = [path for folder in states_here() for path in listed(folder / "plans", "*/model.plan")]
    return PlansReport(models, len(plans), sum(map(_size, plans)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed meanwhile
        return 0


def _recorder(settings: Settings, metrics: Scrape | None) -> RecorderReport:
    if metrics is None:
        return RecorderReport()
    mode, ok = settings.recorder.mode, metrics.value("edge_recorder_ok")
    if ok is None:
        return RecorderReport("off")
    counts: Sequence[int] = [
        int(metrics.value(f"edge_recorder_{name}_total") or 0)
        for name in ("bytes", "dropped", "lost")
    ]
    return RecorderReport("on" if mode == "off" else mode, bool(ok), *counts)


def _channels(metrics: Scrape) -> tuple[FollowedChannel, ...]:
    serials = metrics.by_label("edge_channel_serial", "channel")
    return tuple(
        FollowedChannel(
            found["channel"],
            int(serials.get(found["channel"], 0)),
            found["state"],
            found["trouble"],
        )
        for found in metrics.labels("edge_channel_state", 1)
    )


def _settings(metrics: Scrape | None) -> SettingsReport:
    reloaded = None if metrics is None else metrics.value("edge_settings_reloaded")
    if metrics is None or reloaded is None:
        return SettingsReport()
    waiting = metrics.value("edge_settings_restart_needed") or 0
    return SettingsReport(bool(reloaded), int(waiting))
