"""The daemon's state, reported to the broker, and to systemd by sd_notify(3)."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from edge_server.board.update_record import RecordFile
from edge_server.cameras.status import CameraState
from edge_server.daemon.device_events import DeviceEvents
from edge_server.inference.registry import UNLOADED, ModelState
from edge_server.lifecycle.control import PollControl
from edge_server.process.disk import state_directory
from edge_server.process.sd_notify import notify
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from edge_server.board.watch import BoardCondition, BoardWatch
    from edge_server.cameras.status import CameraStatus
    from edge_server.daemon.reload import SettingsReload
    from edge_server.daemon.status_line import StatusLine
    from edge_server.inference.data_plane import DataPlane
    from edge_server.lifecycle.control import RepositoryControl
    from edge_server.mqtt.publisher import Publisher
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.lane_pipeline import LanePipeline

log = logging.getLogger(__name__)

# The main loop checks the workers, and the state is reported, this often.
LOOK_S = 0.5
HEALTH_S = 10.0
# Each progress report of a build extends systemd's start timeout by its default for a whole start.
START_MORE_S = 90.0
# A camera's state as its topic spells it; in every other state the camera is lost.
_TOPIC_STATES: Mapping[CameraState, Literal["ok", "degraded", "stalled", "frozen"]] = {
    CameraState.LIVE: "ok",
    CameraState.DEGRADED: "degraded",
    CameraState.STALLED: "stalled",
    CameraState.FROZEN: "frozen",
}


class StatusReport:
    """Reports the state of models, cameras and board; a failure to do so ends nothing that works.

    Args:
        free_bytes: returns directory → free space, for the health of the board.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        control: RepositoryControl | PollControl,
        pipelines: Sequence[LanePipeline],
        publisher: Publisher,
        *,
        board: BoardWatch,
        line: StatusLine,
        reload: SettingsReload | None,
        events: EventLog,
        free_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._board = board
        self._events = DeviceEvents(events)
        self._free_bytes = free_bytes
        self._health_due_s = 0.0
        self._health_of: BoardCondition | None = None
        self._data_plane = data_plane
        self._control = control
        self._pipelines = pipelines
        self._publisher = publisher
        self._reload = reload
        self._line = line
        self._notified = ""
        # With the number of steps of the clock: `since` is published anew after one.
        self._published: dict[str, tuple[CameraStatus, str, int]] = {}
        self._faults: dict[str, str] = {}
        self._update = RecordFile(state_directory())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Publish the models while they load, and extend systemd's start timeout while a plan is
        built."""

        def tick(_now: float) -> None:
            self._attempt(self._publish_update)
            self._attempt(self._publish_models)
            self._attempt(self._publish_health)
            self._attempt(self._extend_start)
            worker.wait(LOOK_S)

        worker = Worker("first-load", tick)
        worker.start()
        try:
            yield
        finally:
            worker.stop()
            # Also publishes the reason of a model that failed to load.
            self._attempt(self._publish_models)

    def report(self, event: str) -> str:
        """Publish all states that changed, and notify systemd of `event` (`READY=1`), and of the
        status line where it differs from the last one; return that line."""
        self._board.check()
        self._attempt(self._publish_states)
        self._attempt(self._publish_health)
        self._attempt(self._see_events)
        status = self._attempt(self._status)
        changed = status != self._notified
        if notify(event, *([f"STATUS={status}"] if changed else [])):
            self._notified = status
        return status

    def _extend_start(self) -> None:
        """systemd ends a start that takes longer than its timeout."""
        builds = [
            f"{entry.name}: {entry.reason}"
            for entry in self._data_plane.index(only_ready=False)
            if entry.state is ModelState.LOADING and entry.reason
        ]
        if builds:
            status = "; ".join(builds).replace("\n", " ")
            self._notified = status
            notify(f"EXTEND_TIMEOUT_USEC={round(1e6 * START_MORE_S)}", f"STATUS={status}")

    def _publish_states(self) -> None:
        now = time.monotonic()
        no_lanes = []
        pipelines = tuple(self._pipelines)
        for name in self._published.keys() - {pipeline.camera.name for pipeline in pipelines}:
            del self._published[name]
            self._publisher.clear_camera(name)
        for pipeline in pipelines:
            camera, failure = pipeline.camera, pipeline.failure
            self._publisher.publish_calibration(camera.name, pipeline.calibration)
            status, age_s = camera.status, camera.last_frame_age_s(now)
            if failure or not (status.usable or status.state is CameraState.STARTING):
                no_lanes.append(camera.name)
            published = status, failure, self._board.condition.clock_steps
            if self._published.get(camera.name) != published:
                self._published[camera.name] = published
                self._publisher.publish_camera_status(
                    camera.name,
                    _TOPIC_STATES.get(status.state, "lost"),
                    None if age_s is None else round(1e3 * age_s),
                    failure,
                    failure_reason=pipeline.failure_reason,
                    reason=status.reason,
                    text=status.text,
                    # By the wall clock of now: that of then may have been in 1970.
                    since_epoch_ns=time.time_ns() - (time.monotonic_ns() - status.since_mono_ns),
                )
        self._publish_models()
        self._publish_update()
        settings: dict[str, object] = {}
        if self._reload is not None and self._reload.restart_needed:
            settings["restart_needed"] = self._reload.restart_needed
        if self._reload is not None and self._reload.fault:
            settings["not_reloaded"] = self._reload.fault
        self._publisher.publish_online(no_lanes, **settings)

    def _see_events(self) -> None:
        self._events.see_cameras({p.camera.name: p.camera.status for p in tuple(self._pipelines)})
        self._events.see_models(self._data_plane.index(only_ready=False))
        self._events.see_device(self._board.condition.reasons)

    def _publish_health(self) -> None:
        """Publish the health of the board every `HEALTH_S`, and where its condition changes."""
        now_s, condition = time.monotonic(), self._board.condition
        if now_s < self._health_due_s and condition == self._health_of:
            return
        self._health_due_s, self._health_of = now_s + HEALTH_S, condition
        self._publisher.publish_health(self._board.facts, condition, self._free_bytes())

    def _publish_update(self) -> None:
        # An update engine writes it at any time: before this daemon starts, and when it commits.
        self._publisher.publish_update(self._update.read())

    def _publish_models(self) -> None:
        entries = self._data_plane.index(only_ready=False)
        if isinstance(self._control, PollControl):
            # The model was removed from the repository; on request, an unloaded one may come back.
            entries = [e for e in entries if e.loaded is not None or e.reason != UNLOADED]
        self._publisher.publish_models(entries)

    def _status(self) -> str:
        # The words alone: a temperature beside them would change the line again and again.
        board = "".join(f"; {each.partition(':')[0]}" for each in self._board.condition.reasons)
        return self._line.text(time.monotonic()) + board

    def _attempt(self, report: Callable[[], str | None]) -> str:
        """Return the text of `report`; its failure is logged once per fault."""
        try:
            return report() or ""
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._faults.get(report.__name__):
                self._faults[report.__name__] = fault
                log.exception("the daemon's state cannot be reported; it goes on")
            return "cannot be reported"
