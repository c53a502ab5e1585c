"""The daemon: constructs and starts every part, and stops the parts in reverse order."""

from __future__ import annotations

import gc
import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from edge_server.api.grpc.lane_service import LaneSources
from edge_server.api.http.page.state import PageSources
from edge_server.api.http.server import HttpServer, http_listeners
from edge_server.api.http.sources import ProcessorUse, Sources
from edge_server.backends import load_libraries
from edge_server.board.board import Identity
from edge_server.board.update import RecordFile
from edge_server.board.watch import HTTP_CLOSED, NO_GPU, NOT_RECORDED
from edge_server.daemon.build import build_inference, build_lanes, build_requests
from edge_server.daemon.parts import (
    KnownSurroundings,
    channel_followers,
    directories_of,
    free_space,
)
from edge_server.daemon.reload import SettingsReload, live_parts, shown_settings
from edge_server.daemon.status import LOOK_S, REST_S, StatusReport
from edge_server.errors import EdgeServerError, Reason, StageStuck
from edge_server.inference.data_plane import ENDS_S, MODEL_STUCK_S
from edge_server.lifecycle.poll import PollControl
from edge_server.process.allocator import keep_large_buffers
from edge_server.process.disk import state_directory
from edge_server.process.logs import LogSwitches
from edge_server.process.sd_notify import notify, watchdog_period_s
from edge_server.process.threads import Auxiliary, AwakeTime, check_progress

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from edge_server.pipeline.lane_pipeline import LanePipeline, Listener
    from edge_server.pipeline.networks import NetworkListener
    from edge_server.process.logs import LogTail
    from edge_server.settings import Settings

log = logging.getLogger(__name__)

# A thread that runs Python lets others run after this time. A frame waits for it at each of its
# calls that release the GIL, some fifty: with Python's 5 ms, a client that has its requests parsed
# without end delayed lanes by a quarter of a second.
_SWITCH_S = 0.0005

VERSION = version("edge-server")

# Frames that have had lanes within this time are progress.
_LANES_PROGRESS_S = 10.0

# The farewell and closing the models get this long after the in-flight requests' time is up.
FAREWELL_S = 5.0
# A Python model has 2 s to finalize; all models close in parallel.
CLOSE_S = 3.0


class Daemon:
    """One appliance: models, cameras, gRPC and MQTT, from `start` to `stop`.

    Construction opens only the ports, so a port in use is reported before anything else runs.

    Args:
        log_switches: the log settings that clients change; None covers all that this process logs.
        reload_requested: set where that shall be done; None never does it. See `SettingsReload`.

    Raises:
        Unavailable: the address of gRPC, HTTP or metrics cannot be bound, or the directory of
            traces, of the models' copies or of the socket is not writable.
        AlreadyRunning: another daemon holds the Unix socket.
        SettingsError: the broker's settings contradict each other, their files cannot be read, or a
            certificate is invalid.
    """

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[Listener] = (),
        log_switches: LogSwitches | None = None,
        read_settings: Callable[[], Settings] | None = None,
        reload_requested: threading.Event | None = None,
        *,
        network_listeners: Sequence[NetworkListener] = (),
    ) -> None:
        keep_large_buffers()
        sys.setswitchinterval(_SWITCH_S)
        identity = Identity.of_this_host(settings.device.id, VERSION)
        log_switches = log_switches or LogSwitches()
        inference = build_inference(settings, identity)
        requests = build_requests(settings, identity, inference, log_switches)
        lanes = build_lanes(
            settings,
            identity,
            inference,
            listeners,
            self._faults,
            network_listeners=network_listeners,
        )
        recorder, pipelines = lanes.recorder, lanes.cameras.pipelines
        requests.grpc.offer_lanes(
            LaneSources(
                identity,
                lanes.feed,
                lanes.networks,
                lanes.events,
                lanes.vehicle,
                pipelines,
                None if recorder is None else recorder.request,
            )
        )
        self._reload = None
        if read_settings is not None and reload_requested is not None:
            parts = live_parts(
                lanes.cameras,
                lanes.publisher,
                requests.grpc,
                inference.tracer,
                log_switches,
                allow_to_finish=self._allow_to_finish,
            )
            self._reload = SettingsReload(settings, read_settings, reload_requested, parts)
        self._inference, self._requests, self._lanes = inference, requests, lanes
        self.devices, self.control = inference.devices, inference.control
        self.data_plane, self._grpc = inference.data_plane, requests.grpc
        surroundings = KnownSurroundings(lanes.vehicle, lanes.board)
        self._channels = channel_followers(settings, self.control, surroundings, lanes.events)
        disks = partial(free_space, directories_of(settings))
        self._http, self._page = self._http_server(settings, identity, disks, log_switches.tail)
        self._auxiliary = self._auxiliary_parts()
        publisher = lanes.publisher
        self._mqtt = Auxiliary("mqtt", publisher.workers, publisher.reopen)
        # How many frames had lanes, and when the main loop saw the last of them.
        self._progress = (0, 0.0)
        self._hangs = ""
        self._status = StatusReport(
            self.data_plane,
            self.control,
            pipelines,
            lanes.publisher,
            board=lanes.board,
            rate=lanes.rate,
            reload=self._reload,
            free_bytes=disks,
            events=lanes.events,
            channels=self._channels,
        )
        self._running = ExitStack()
        self._exit_timeout_s = settings.serving.exit_timeout_s
        self._stop_by = 0.0

    def _http_server(
        self,
        settings: Settings,
        identity: Identity,
        disks: Callable[[], Mapping[str, int]],
        tail: LogTail,
    ) -> tuple[HttpServer, PageSources]:
        """Return the server of HTTP and metrics, and what its page shows; `disks` returns the free
        space of directories."""
        reload = self._reload
        inference, requests, lanes = self._inference, self._requests, self._lanes
        sources = Sources(
            VERSION,
            lambda: self.data_plane.index(only_ready=False),
            lanes.cameras.pipelines,
            lanes.latency,
            lanes.publisher,
            ProcessorUse() if settings.metrics.cpu else None,
            self.control if isinstance(self.control, PollControl) else None,
            lanes.board,
            free_bytes=disks,
            gpu=settings.metrics.gpu,
            settings=self._reload,
            recorder=lanes.recorder,
            requests=requests.counts,
            events=lanes.events.counts,
            ready=self.data_plane.server_ready,
            spans=inference.spans,
            channels=self._channels,
        )
        page = PageSources(
            identity,
            # How busy the processors are counts from one reading to the next, of one reader.
            replace(sources, processors=ProcessorUse()),
            lanes.pictures,
            lanes.events,
            settings.vehicle.width_m,
            RecordFile(state_directory()),
            may_read=None if requests.tokens is None else requests.tokens.may_read,
            rules=requests.rest.rules,
            log=tail,
            settings=lambda: shown_settings(settings if reload is None else reload.wanted),
        )
        return HttpServer(http_listeners(settings, requests.rest, sources, page)), page

    @property
    def pipelines(self) -> Sequence[LanePipeline]:
        """The loops of the present cameras."""
        return self._lanes.cameras.pipelines

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    @property
    def metrics_port(self) -> int:
        """The port of the metrics endpoint; 0 without metrics."""
        return self._http.port_of("metrics")

    @property
    def http_port(self) -> int:
        """The port of HTTP; 0 without HTTP."""
        return self._http.port_of("http")

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
            for start_part, stop_part in self._parts(stop):
                started.callback(stop_part)
                start_part()
            self._running = started.pop_all()
        # Objects alive now stay alive: the collector need not scan them in every full collection.
        gc.collect()
        gc.freeze()
        if not stop.is_set():
            log.info("edge-server %s: ready, %s", VERSION, self._status.report("READY=1"))
            # systemd accepts RELOADING=1 only of a service that is ready.
            if self._reload is not None:
                self._reload.worker.start()

    def _parts(self, stop: threading.Event) -> Iterator[tuple[Callable[[], object], ...]]:
        """Yield how each part starts and stops; they stop in reverse order."""
        models, lanes = self._inference, self._lanes
        yield lanes.board.start, lanes.board.stop
        yield _nothing, self.devices.close
        yield _nothing, models.scheduling.close
        yield _nothing, lambda: self.control.close(self._left_s() + CLOSE_S)
        if (traces := models.traces) is not None:
            yield traces.start, traces.stop
        if (spans := models.spans) is not None:
            yield spans.start, spans.stop
        if (recorder := lanes.recorder) is not None:
            yield recorder.start, recorder.stop
        yield lanes.events.worker.start, lanes.events.stop
        # From here on a client's health check returns "live, not ready".
        yield self._grpc.start, lambda: self._grpc.stop(self._left_s())
        yield lanes.pictures.worker.start, lanes.pictures.stop
        yield self._http.start, lambda: self._http.stop(self._left_s())
        yield lanes.cameras.open_recordings, lambda: lanes.cameras.stop(self._left_s)
        yield lanes.publisher.start, lanes.publisher.stop
        yield lambda: self._load(stop), _nothing
        for channel in self._channels:
            # A request to a registry may take a minute, and is not waited for.
            yield channel.worker.start, channel.worker.ask_to_stop
        yield lambda: self._serve(stop), self._drain

    def run(self, stop: threading.Event) -> None:
        """Supervise the parts until `stop` is set.

        Raises:
            DeviceLost: a GPU is broken, on any thread; only a new process recovers.
            StageStuck: a worker hangs, or a model whose run cannot be ended, or gRPC does not
                respond; only a new process recovers. While lanes progress, nothing ends it that
                they do without.
            InternalError: a worker died. One of `Auxiliary` is started again.
        """
        longest_s = (watchdog_period_s() or 2 * REST_S) / 2
        awake = AwakeTime(2 * min(REST_S, longest_s))
        while not stop.wait(min(LOOK_S if self.pipelines else REST_S, longest_s)):
            # First, as a lost device may be the reason why a worker died.
            self.devices.check()
            awake.look(now := time.monotonic())
            check_progress(self._lanes.cameras.workers(), awake)
            self._check_others(now, awake)
            self._lanes.cameras.check(now)
            for auxiliary in (*self._auxiliary.values(), self._mqtt):
                auxiliary.check(now, awake)
            self.control.unload_idle(now)
            self._page.history.look(now, self._page.parts)
            model, since = self.data_plane.oldest_run()
            if (over_s := awake.since(since) - MODEL_STUCK_S) > 0:
                text = f"model {model}: one run takes more than {MODEL_STUCK_S:g} s"
                if over_s > ENDS_S or not self.data_plane.end_runs(since):
                    raise StageStuck(text)
                log.error("%s; it is ended, and its callers get an error", text)
            self._status.report("WATCHDOG=1")

    def stop(self) -> None:
        """Stop within `serving.exit_timeout_s` plus the broker's farewell, whichever part hangs.

        The daemon is not ready at once; in-flight requests finish; the publisher publishes
        `offline`; all parts close.
        """
        # systemd's own stop timeout may be shorter than the configured one.
        timeout_us = round(1e6 * (self._exit_timeout_s + FAREWELL_S))
        notify("STOPPING=1", "STATUS=stopping", f"EXTEND_TIMEOUT_USEC={timeout_us}")
        self._running.close()
        log.info("edge-server: stopped")

    def _load(self, stop: threading.Event) -> None:
        """Load models and open cameras; builds take minutes, reported to broker and systemd."""
        with self._status.loading():
            try:
                load_libraries(self.devices)
                self.control.start(stop)
                self._lanes.cameras.validate(stop, self._awaits)
            except EdgeServerError:
                self.devices.check()
                raise

    def _awaits(self, model: str) -> bool:
        """Return whether a camera starts without its model, which may be loaded later."""
        return self.devices.awaited or self.control.awaits(model)

    def _serve(self, stop: threading.Event) -> None:
        if not stop.is_set():
            self._lanes.cameras.start()
            self.data_plane.open()

    def _drain(self) -> None:
        """Request every part to stop before waiting for any of them."""
        self._stop_by = time.monotonic() + self._exit_timeout_s
        self.data_plane.shut()
        self._grpc.drain()
        self._requests.rest.gate.close()
        self._lanes.cameras.ask_to_stop()
        if self._reload is not None:
            self._reload.stop(self._left_s())

    def _allow_to_finish(self, exit_timeout_s: float) -> None:
        """Give requests in flight so long at the next stop."""
        self._exit_timeout_s = exit_timeout_s

    def _left_s(self) -> float:
        return max(0.0, self._stop_by - time.monotonic())

    def _auxiliary_parts(self) -> Mapping[str, Auxiliary]:
        """Return what hostile clients, or a disk, may bring down, by the reason's word."""
        http, recorder = self._http, self._lanes.recorder
        parts = {HTTP_CLOSED: Auxiliary("http", lambda: [http.worker], http.reopen)}
        if recorder is not None:
            parts[NOT_RECORDED] = Auxiliary("recorder", lambda: recorder.workers, recorder.reopen)
        return parts

    def _faults(self) -> list[Reason]:
        """Return which parts do not work, and why: a GPU that has not come, auxiliary parts."""
        if self.devices.awaited:
            return [Reason(NO_GPU, self.devices.reason)]
        found = [Reason(word, each.fault) for word, each in self._auxiliary.items() if each.fault]
        if not found and self._lanes.recorder is not None and self._lanes.recorder.failure:
            found.append(Reason(NOT_RECORDED, self._lanes.recorder.failure))
        return found

    def _check_others(self, now: float, awake: AwakeTime) -> None:
        """Raise where a thread beside those of cameras and of `Auxiliary` has died, or hangs, or
        gRPC does not respond, while no lanes progress: a restart would interrupt them."""
        if (frames := self._lanes.latency.frames()) != self._progress[0]:
            self._progress = frames, now
        parts = (self._lanes.events, self._grpc.self_call, self._reload)
        workers = [part.worker for part in parts if part is not None]
        if isinstance(self.control, PollControl):
            workers.append(self.control.worker)
        looks: list[Callable[[], None]] = [
            partial(check_progress, [worker], awake) for worker in workers
        ]
        if self._grpc.self_call is not None:
            looks.append(self._grpc.self_call.check)
        hangs = ""
        for look in looks:  # each: one that hangs must not hide that another one has died
            try:
                look()
            except StageStuck as error:
                hangs = hangs or str(error)
        if hangs and (not self._progress[0] or awake.since(self._progress[1]) > _LANES_PROGRESS_S):
            raise StageStuck(hangs)
        if hangs and hangs != self._hangs:
            log.error("%s; the daemon goes on, as lanes do", hangs)
        self._hangs = hangs


def _nothing() -> None:
    """What a part does that needs no start, or no stop."""
