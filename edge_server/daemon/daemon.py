"""The daemon: constructs and starts every part, and stops the parts in reverse order."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from edge_server.api.grpc.server import GrpcServer
from edge_server.api.http.metrics import MetricsServer
from edge_server.api.http.sources import LaneLatency, ProcessorUse, Sources
from edge_server.cameras.camera import Camera, CameraState
from edge_server.cameras.source import is_live
from edge_server.daemon.model_parts import (
    chosen_control,
    chosen_scheduling,
    following_control,
    python_of,
)
from edge_server.errors import EdgeServerError, SettingsError, SourceError, StageStuck
from edge_server.gpu.devices import Devices
from edge_server.inference.data_plane import MODEL_STUCK_S, DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.snapshot import UNLOADED, ModelState
from edge_server.inference.tracing.trace_file import TraceFile, TraceWriter
from edge_server.inference.tracing.traced_request import TraceRule
from edge_server.inference.tracing.tracer import Tracer
from edge_server.lifecycle.poll_control import PollControl
from edge_server.mqtt.broker import faults_of
from edge_server.mqtt.publisher import Publisher
from edge_server.mqtt.topics import Identity
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.process.allocator import keep_large_buffers
from edge_server.process.sd_notify import notify, watchdog_period_s
from edge_server.process.worker import Worker, check_progress

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from edge_server.lifecycle.control import RepositoryControl
    from edge_server.pipeline.lane_pipeline import Listener
    from edge_server.process.logs import LogSwitches
    from edge_server.settings import Settings, TraceSection

log = logging.getLogger(__name__)

VERSION = version("edge-server")

# The main loop checks the workers this often.
LOOK_S = 0.5
# The farewell and closing the models get this long after the in-flight requests' time is up.
FAREWELL_S = 5.0
# A Python model has 2 s to finalize; all models close in parallel.
CLOSE_S = 3.0
# Each progress report of a build extends systemd's start timeout by its default for a whole start.
START_MORE_S = 90.0
# Characters of a model's error in systemd's status.
_LONGEST_STATUS = 200
# An open camera that delivers no frame for this long has stalled.
STALLED_S = 1.0


class Daemon:
    """One appliance: models, cameras, gRPC and MQTT, from `start` to `stop`.

    Construction opens only the ports, so a port in use is reported before anything else runs.

    Args:
        settings: the settings of this run.
        listeners: receive every LaneFrame, beside the MQTT publisher.
        log_switches: the log settings that clients change; None covers all that this process logs.

    Raises:
        Unavailable: the gRPC or the metrics address cannot be bound, or the directory of traces, of
            the models' copies or of the socket is not writable.
        AlreadyRunning: another daemon holds the Unix socket.
        SettingsError: the broker's settings contradict each other, their files cannot be read, or a
            certificate is invalid.
    """

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[Listener] = (),
        log_switches: LogSwitches | None = None,
    ) -> None:
        keep_large_buffers()
        self.devices = Devices()
        self._registry = ModelRegistry()
        self._settings = settings
        self.data_plane = DataPlane(
            self._registry, strict_readiness=settings.repository.strict_readiness
        )
        self._scheduling = chosen_scheduling(settings.serving)
        repository = settings.repository
        make_control = following_control if repository.mode == "poll" else chosen_control
        self.control: RepositoryControl | PollControl = make_control(
            self._registry,
            self._scheduling,
            self.devices,
            repository,
            python=python_of(settings),
            cameras=settings.cameras,
        )
        self._trace_writer = (
            TraceWriter(TraceFile(settings.trace.file)) if settings.trace.file else None
        )
        self._grpc = GrpcServer(
            self.data_plane,
            settings.grpc,
            settings.serving.name,
            VERSION,
            control=self.control,
            client_shared_memory=settings.serving.client_shared_memory,
            tracer=Tracer(_trace_rule(settings.trace), self._trace_writer),
            log_switches=log_switches,
        )
        self._publisher: Publisher | None = None
        if settings.mqtt is not None:
            identity = Identity.of_this_host(settings.device.id, VERSION)
            # Later a file may be absent while it is replaced; at the start that is a mistake.
            if faults := faults_of(settings.mqtt):
                raise SettingsError("\n".join(faults))
            publisher = self._publisher = Publisher(settings.mqtt, identity)
            listeners = (*listeners, lambda lane_frame, _frame: publisher.publish_lanes(lane_frame))
        latency = LaneLatency()
        self.pipelines = [
            LanePipeline(
                Camera(name, camera.uri), self.data_plane, camera.model, (*listeners, latency)
            )
            for name, camera in settings.cameras.items()
        ]
        self._metrics = self._metrics_server(settings, latency)
        workers = [w for p in self.pipelines for w in (p.camera.worker, p.worker)]
        if self._publisher is not None:
            workers.append(self._publisher.worker)
        if self._metrics is not None:
            workers.append(self._metrics.worker)
        if isinstance(self.control, PollControl):
            workers.append(self.control.worker)
        if self._grpc.self_call is not None:
            workers.append(self._grpc.self_call.worker)
        self._workers = workers
        self._running = ExitStack()
        self._told: dict[str, tuple[str, str]] = {}
        self._untold: dict[str, str] = {}
        self._stop_by = 0.0

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    @property
    def metrics_port(self) -> int:
        """The port of the metrics endpoint; 0 without metrics."""
        return 0 if self._metrics is None else self._metrics.port

    def start(self, stop: threading.Event) -> None:
        """Start every part; if one part fails, the parts started before it are stopped again.

        Returns early, not ready, when `stop` is set meanwhile; the caller still calls `stop()`.

        Raises:
            ModelConfigError: a model cannot be loaded; ModelLoadError if a retry may succeed.
            SettingsError: a camera's model is no lane model.
            Unavailable: a camera's model is not loaded, or cannot respond.
            DeviceLost: a GPU is broken and caused other errors.
            SourceError: a camera's recording cannot be opened.
            SourceUriError: a camera's URI is wrong.
        """
        log.info("gpus: %s", self.devices.reason or self.devices.count)
        with ExitStack() as started:
            started.callback(self.devices.close)
            started.callback(self._scheduling.close)
            started.callback(lambda: self.control.close(self._left_s() + CLOSE_S))
            if (traces := self._trace_writer) is not None:
                started.callback(traces.stop)
                traces.start()
            # From here on a client's health check returns "live, not ready".
            started.callback(lambda: self._grpc.stop(self._left_s()))
            self._grpc.start()
            if (metrics := self._metrics) is not None:
                started.callback(lambda: metrics.stop(self._left_s()))
                metrics.start()
            started.callback(self._stop_pipelines)
            self._open_recordings()
            if (publisher := self._publisher) is not None:
                started.callback(publisher.stop)
                publisher.start()
            self._load(stop)
            started.callback(self._say_goodbye)
            if not stop.is_set():
                for pipeline in self.pipelines:
                    pipeline.camera.start()
                    pipeline.worker.start()
                self.data_plane.open()
            self._running = started.pop_all()
        # Objects alive now stay alive: the collector need not scan them in every full collection.
        gc.collect()
        gc.freeze()
        if not stop.is_set():
            self._attempt(self._publish_states)
            status = self._attempt(self._status)
            notify("READY=1", f"STATUS={status}")
            log.info("edge-server %s: ready, %s", VERSION, status)

    def run(self, stop: threading.Event) -> None:
        """Supervise the parts until `stop` is set.

        Raises:
            DeviceLost: a GPU is broken, on any thread; only a new process recovers.
            StageStuck: a worker or a model hangs, or gRPC does not respond; only a new process
                recovers.
            InternalError: a worker died.
        """
        period_s = min(LOOK_S, (watchdog_period_s() or LOOK_S) / 2)
        while not stop.wait(period_s):
            # First, as a lost device may be the reason why a worker died.
            self.devices.check()
            now = time.monotonic()
            check_progress(self._workers, now)
            if self._grpc.self_call is not None:
                self._grpc.self_call.check()
            model, running_s = self.data_plane.longest_run(now)
            if running_s > MODEL_STUCK_S:
                raise StageStuck(f"model {model}: one run takes more than {MODEL_STUCK_S:g} s")
            self._attempt(self._publish_states)
            notify("WATCHDOG=1", f"STATUS={self._attempt(self._status)}")

    def stop(self) -> None:
        """Stop within `serving.exit_timeout_s` plus the broker's farewell, whichever part hangs.

        The daemon is not ready at once; in-flight requests finish; the publisher publishes
        `offline`; all parts close.
        """
        # systemd's own stop timeout may be shorter than the configured one.
        patience_us = round(1e6 * (self._settings.serving.exit_timeout_s + FAREWELL_S))
        notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={patience_us}")
        self._running.close()
        log.info("edge-server: stopped")

    def _open_recordings(self) -> None:
        """Report a camera's mistake before the models load, which may take minutes.

        Only the URI of a live camera is checked: an open one would fill its buffers meanwhile.
        """
        for pipeline in self.pipelines:
            camera = pipeline.camera
            try:
                if not is_live(camera.source_uri):
                    camera.open()
            except SourceError as error:
                raise type(error)(f"camera {camera.name}: {error}") from error

    def _load(self, stop: threading.Event) -> None:
        """Load models and open cameras; builds take minutes, reported to broker and systemd."""

        def tell(_now: float) -> None:
            self._attempt(self._publish_models)
            self._attempt(self._tell_builds)
            telling.wait(LOOK_S)

        telling = Worker("first-load", tell)
        telling.start()
        try:
            self.control.start(stop)
            for pipeline in self.pipelines:
                if stop.is_set():
                    break
                pipeline.validate()
                try:
                    pipeline.camera.open()
                except SourceError as error:
                    raise type(error)(f"camera {pipeline.camera.name}: {error}") from error
        except EdgeServerError:
            self.devices.check()
            raise
        finally:
            telling.stop()
            # Also publishes the reason of a model that failed to load.
            self._attempt(self._publish_models)

    def _tell_builds(self) -> None:
        """Extend systemd's start timeout while a plan is built; systemd ends a start without it."""
        builds = [
            f"{entry.name}: {entry.reason}"
            for entry in self.data_plane.index(only_ready=False)
            if entry.state is ModelState.LOADING and entry.reason
        ]
        if builds:
            status = "; ".join(builds).replace("\n", " ")
            notify(f"EXTEND_TIMEOUT_USEC={round(1e6 * START_MORE_S)}", f"STATUS={status}")

    def _say_goodbye(self) -> None:
        """Ask every part to stop before waiting for any of them."""
        self._stop_by = time.monotonic() + self._settings.serving.exit_timeout_s
        self.data_plane.shut()
        self._grpc.drain()
        for pipeline in self.pipelines:
            pipeline.worker.ask_to_stop()
            pipeline.camera.worker.ask_to_stop()

    def _stop_pipelines(self) -> None:
        for pipeline in self.pipelines:
            pipeline.worker.stop(self._left_s())
            pipeline.camera.stop(self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self._stop_by - time.monotonic())

    def _metrics_server(self, settings: Settings, latency: LaneLatency) -> MetricsServer | None:
        if not settings.metrics.enabled:
            return None
        sources = Sources(
            VERSION,
            lambda: self.data_plane.index(only_ready=False),
            self.pipelines,
            latency,
            self._publisher,
            ProcessorUse() if settings.metrics.cpu else None,
            self.control if isinstance(self.control, PollControl) else None,
        )
        return MetricsServer(settings.metrics, sources)

    def _publish_states(self) -> None:
        """Publish the states that changed since the last call."""
        if self._publisher is None:
            return
        now = time.monotonic()
        no_lanes = []
        for pipeline in self.pipelines:
            camera, failure = pipeline.camera, pipeline.failure
            age_s = camera.last_frame_age_s(now)
            state = _camera_state(camera.state, age_s)
            if failure or (state != "ok" and camera.state is not CameraState.STARTING):
                no_lanes.append(camera.name)
            if self._told.get(camera.name) != (state, failure):
                self._told[camera.name] = state, failure
                age_ms = None if age_s is None else round(1e3 * age_s)
                self._publisher.publish_camera_status(camera.name, state, age_ms, failure)
        self._publish_models()
        self._publisher.publish_online(no_lanes)

    def _publish_models(self) -> None:
        if self._publisher is None:
            return
        entries = self.data_plane.index(only_ready=False)
        if isinstance(self.control, PollControl):
            # The model was removed from the repository; on request, an unloaded one may come back.
            entries = [e for e in entries if e.loaded is not None or e.reason != UNLOADED]
        self._publisher.publish_models(entries)

    def _status(self) -> str:
        cameras = ", ".join(
            f"{p.camera.name} {p.camera.state.value}, {p.camera.captured} frames, "
            f"{p.camera.dropped} dropped, {p.failed_frames} failed"
            + (f", no lanes: {p.failure[:_LONGEST_STATUS]}" if p.failure else "")
            for p in self.pipelines
        )
        broker = "off"
        if self._publisher is not None:
            state = "connected" if self._publisher.connected else "away"
            broker = f"{state}, {self._publisher.dropped} lanes dropped"
        ready = len(self.data_plane.index(only_ready=True))
        # systemd reads a second line as another assignment.
        return f"{ready} models; cameras: {cameras or 'none'}; mqtt: {broker}".replace("\n", " ")

    def _attempt(self, tell: Callable[[], str | None]) -> str:
        """Return the text of `tell`; its failure is logged once per fault and ends nothing that
        works."""
        try:
            return tell() or ""
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._untold.get(tell.__name__):
                self._untold[tell.__name__] = fault
                log.exception("how the daemon is cannot be told; it goes on")
            return "cannot be told"


def _trace_rule(settings: TraceSection) -> TraceRule:
    """Return the trace rule at the start."""
    return TraceRule(
        "TIMESTAMPS" in settings.level, settings.rate, settings.count, settings.log_frequency
    )


def _camera_state(state: CameraState, age_s: float | None) -> Literal["ok", "stalled", "lost"]:
    """Return a camera's state as its topic spells it."""
    if state is not CameraState.LIVE or age_s is None:
        return "lost"
    return "ok" if age_s < STALLED_S else "stalled"
