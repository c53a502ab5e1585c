"""The daemon's state, reported to the broker, and to systemd by sd_notify(3)."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from edge_server.board.update import RecordFile
from edge_server.cameras.status import CameraState
from edge_server.inference.registry import UNLOADED, ModelState
from edge_server.lifecycle.poll import PollControl
from edge_server.pipeline.event_log import Event, LastingEvents
from edge_server.process.disk import state_directory
from edge_server.process.sd_notify import notify
from edge_server.process.text import shortened
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from edge_server.board.watch import BoardWatch, DeviceReport
    from edge_server.cameras.status import CameraStatus
    from edge_server.daemon.reload import SettingsReload
    from edge_server.errors import Reason
    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.registry import ModelEntry
    from edge_server.lanes.agreement import Disagreement, LaneVerdict
    from edge_server.lifecycle.control import RepositoryControl
    from edge_server.mqtt.publisher import Publisher
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.lane_pipeline import LanePipeline
    from edge_server.repository.channel import ChannelFollower
    from edge_server.settings.sections import EventKind

# As `Lifecycle.roll_back` reports it of the version that serves again.
_ROLLED_BACK = "rolled back: "


class DeviceEvents:
    """Compares what cameras, models and the device are with what they were; for one thread.

    The first look at a camera that never had a fault, or at a model that serves, is no event.
    """

    def __init__(self, log: EventLog) -> None:
        self._lasting = LastingEvents(log)
        self._models: dict[str, ModelEntry] = {}  # the newest version that serves
        self._verdicts: dict[tuple[str, str], str] = {}

    def see_cameras(self, statuses: Mapping[str, CameraStatus]) -> None:
        """Put what has changed of the present cameras; of those that are gone, their faults end."""
        lasting = self._lasting.names("camera")
        for name in lasting.keys() - statuses.keys():
            text = "the camera was removed from the settings"
            self._lasting.end(name, _event("camera", "removed", text, camera=name))
        for name, status in statuses.items():
            if status.state is CameraState.STOPPED:  # by a reload, which goes on at once
                continue
            is_well = status.state in {CameraState.LIVE, CameraState.STARTING}
            fault = "" if is_well else status.reason or status.state.value
            if (before := lasting.get(name, "")) == fault:
                continue
            text = "the camera has this fault no more"
            self._lasting.end(name, _event("camera", before, text, camera=name))
            if fault:
                self._lasting.begin(name, _event("camera", fault, status.text, camera=name))

    def see_verdict(self, camera: str, model: str, verdict: LaneVerdict | None) -> None:
        """Put that a candidate for the camera's lanes has become good, or worse, than those."""
        before, outcome = self._verdicts.get((camera, model)), "watching"
        if verdict is not None:
            outcome = verdict.outcome
        self._verdicts[camera, model] = outcome
        if verdict is not None and outcome not in ("watching", before):
            cause = f"candidate_{outcome}"
            event = _event("model", cause, verdict.text, camera=camera, model=model)
            self._lasting.put(event)

    def see_disagreement(self, camera: str, model: str, found: Disagreement | None) -> None:
        """Put that a candidate sees another road than the lanes that are served."""
        if found is not None:
            event = _event("model", "candidate_differs", found.text, camera=camera, model=model)
            self._lasting.put(event)

    def see_device(self, reasons: Iterable[Reason]) -> None:
        """Put what degrades all lanes: the reasons that begin and end."""
        present = dict(reasons)
        lasting = self._lasting.names("degraded").keys()
        for word in lasting - present.keys():
            self._lasting.end(word, _event("degraded", word, "the device is as it should be"))
        for word in present.keys() - lasting:
            self._lasting.begin(word, _event("degraded", word, present[word]))

    def see_models(self, entries: Iterable[ModelEntry]) -> None:
        """Put which versions serve now, were rolled back, or cannot serve."""
        by_name: dict[str, list[ModelEntry]] = {}
        for entry in entries:
            by_name.setdefault(entry.name, []).append(entry)
        for name in self._models.keys() - by_name.keys():
            del self._models[name]
            self._lose(name, "removed", "the model was removed from the repository")
        for name, versions in by_name.items():
            ready = [each for each in versions if each.loaded is not None]
            if ready:
                self._serve(max(ready, key=lambda each: each.version))
            elif name in self._models and all(
                each.state is not ModelState.LOADING for each in versions
            ):
                del self._models[name]
                newest = max(versions, key=lambda each: each.version)
                self._lose(name, "unavailable", newest.reason)

    def _lose(self, name: str, cause: str, text: str) -> None:
        self._lasting.begin(name, _event("model", cause, text, model=name))

    def _serve(self, entry: ModelEntry) -> None:
        name, serves = entry.name, f"version {entry.version} serves"
        before = self._models.get(name)
        self._models[name] = entry
        which = {"model": name, "model_version": str(entry.version)}
        if name in self._lasting.names("model"):
            self._lasting.end(name, _event("model", "unavailable", serves, **which))
        elif entry.reason.startswith(_ROLLED_BACK):
            if before is None or entry.reason != before.reason:
                text = f"{serves} again: {entry.reason.removeprefix(_ROLLED_BACK)}"
                self._lasting.put(_event("model", "rolled_back", text, **which))
        elif before is not None and before.loaded is not entry.loaded:
            if before.version == entry.version and (before.is_idle or entry.is_idle):
                return
            self._lasting.put(_event("model", "swapped", serves, **which))


def _event(kind: EventKind, cause: str, text: str, **of: str) -> Event:
    return Event(kind, "instant", cause, text, time.monotonic_ns(), time.time_ns(), **of)  # type: ignore[arg-type]


# Characters of one reason.
_LONGEST_REASON = 120
_RATE_PERIOD_S = 10.0
# A rate that differs by less stays as it was shown, so that the line changes with the state only.
_RATE_DIFFERS = 0.15


class LaneRate:
    """Measures how many frames get lanes.

    Args:
        frames: returns how many frames have had lanes; a camera that was removed counts no more.
    """

    def __init__(self, frames: Callable[[], int]) -> None:
        self._frames = frames
        self._measured: tuple[float, int] | None = None
        self._shown_hz: float | None = None

    def shown_hz(self, now: float) -> float | None:
        """Return about how many frames got lanes per second; None in the first seconds.

        The number is that of the last `_RATE_PERIOD_S`, and stays while it differs little.
        """
        total = self._frames()
        if self._measured is None:
            self._measured = now, total
        at, before = self._measured
        if now - at >= _RATE_PERIOD_S:
            self._measured = now, total
            rate_hz, shown_hz = max(0, total - before) / (now - at), self._shown_hz
            if shown_hz is None or abs(rate_hz - shown_hz) > _RATE_DIFFERS * min(rate_hz, shown_hz):
                self._shown_hz = rate_hz
        return self._shown_hz


def status_line(
    entries: Sequence[ModelEntry],
    pipelines: Sequence[LanePipeline],
    broker: str,
    rate: LaneRate,
    reload: SettingsReload | None = None,
    *,
    now: float,
) -> str:
    """Return the line at `now`, `time.monotonic()`. It changes where a state does: durations and
    rates are in coarse steps.
    """
    ready = {entry.name for entry in entries if entry.state is ModelState.READY}
    failed = {
        entry.name: _short(entry.reason)
        for entry in entries
        if entry.name not in ready and entry.reason != UNLOADED and not entry.is_idle
    }
    models = _some("model", len(ready), len(ready) + len(failed), failed)
    if degraded := [e.name for e in entries if e.configuration and e.configuration.degraded]:
        models += f" ({', '.join(degraded)} degraded)"
    faults = {p.camera.name: fault for p in pipelines if (fault := _fault(p, now))}
    working = sum(p.camera.status.usable and not p.failure for p in pipelines)
    cameras = _some("camera", working, len(pipelines), faults) if pipelines else "no camera"
    line = f"serving {models}, {cameras}, broker {broker}"
    if any(each.model for each in pipelines) and (rate_hz := rate.shown_hz(now)) is not None:
        line += f", {rate_hz:.{0 if rate_hz >= 10 else 1}f} lanes/s"
    if reload is not None:
        if reload.restart_needed:
            line += f"; restart needed for {', '.join(reload.restart_needed)}"
        if reload.fault:
            line += f"; settings not reloaded: {reload.fault[: 2 * _LONGEST_REASON]}"
    # systemd reads a second line as another assignment.
    return line.replace("\n", " ")


def _some(word: str, working: int, all_: int, faults: Mapping[str, str]) -> str:
    """Return `2 models`, or `1 of 2 models` with the faults of the others."""
    counted = f"{all_} {word}{'' if all_ == 1 else 's'}"
    if not faults:
        return counted
    reasons = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    return f"{working} of {counted} ({reasons})"


def _fault(pipeline: LanePipeline, now: float) -> str:
    """Return what is wrong with a camera, and since when; empty if nothing is."""
    status = pipeline.camera.status
    if status.state is not CameraState.LIVE:
        return f"{spelt(status)}{_duration(now - status.since_mono_ns / 1e9)}"
    if pipeline.failure:
        return f"no lanes: {_short(pipeline.failure)}"
    failing = ((each.name, each.failure) for each in pipeline.networks if each.failure)
    return next((f"network {name}: {_short(text)}" for name, text in failing), "")


def spelt(status: CameraStatus) -> str:
    """Return a camera's state with its reason, where it has one that the state does not say."""
    state, reason = status.state.value, status.reason
    return state if reason in {"", state, "no_frames"} else f"{state} ({reason})"


def _duration(seconds: float) -> str:
    """Return a duration that changes seldom: ` 20 s`, ` 5 min`, ` 3 h`; empty below 10 s."""
    if seconds < 10:
        return ""
    if seconds < 60:
        return f" {int(seconds // 10) * 10} s"
    return f" {int(seconds // 60)} min" if seconds < 3600 else f" {int(seconds // 3600)} h"


def _short(text: Any) -> str:
    return shortened(str(text), _LONGEST_REASON)


log = logging.getLogger(__name__)

# The main loop checks the workers, and the state is reported, this often.
LOOK_S = 0.5
# Without cameras.
REST_S = 1.0
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
        control: RepositoryControl,
        pipelines: Sequence[LanePipeline],
        publisher: Publisher,
        *,
        board: BoardWatch,
        rate: LaneRate,
        reload: SettingsReload | None,
        events: EventLog,
        free_bytes: Callable[[], Mapping[str, int]],
        channels: Sequence[ChannelFollower] = (),
    ) -> None:
        self._board = board
        self._events = DeviceEvents(events)
        self._free_bytes = free_bytes
        self._channels = channels
        self._data_plane = data_plane
        self._control = control
        self._pipelines = pipelines
        self._publisher = publisher
        self._reload = reload
        self._rate = rate
        self._notified = ""
        self._cameras: set[str] = set()  # that have topics
        self._shadows: set[tuple[str, str]] = set()  # likewise
        self._reported: dict[str, tuple[object, ...]] = {}
        self._faults: dict[str, str] = {}
        self._update = RecordFile(state_directory())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Publish the models while they load, and extend systemd's start timeout while a plan is
        built."""

        def tick(_now: float) -> None:
            self._report_device(self._board.report)
            with self._going_on("start"):
                self._extend_start(self._report_models())
            worker.wait(LOOK_S)

        worker = Worker("first-load", tick)
        worker.start()
        try:
            yield
        finally:
            worker.stop()
            # Also publishes the reason of a model that failed to load.
            with self._going_on("start"):
                self._report_models()

    def report(self, event: str) -> str:
        """Publish all states that changed, and notify systemd of `event` (`READY=1`), and of the
        status line where it differs from the last one; return that line."""
        self._board.check()
        device = self._board.latest
        # Before the device is online, when topics without a state are cleared.
        for each in (channel.report for channel in self._channels):
            self._attempt(f"channel {each.channel}", self._publisher.publish_channel, each)
        with self._going_on("cameras"):
            self._report_cameras(tuple(self._pipelines), device)
        with self._going_on("models"):
            entries = self._report_models()
            self._attempt("model events", self._events.see_models, entries)
        self._report_device(device)
        self._attempt("device events", self._events.see_device, device.reasons)
        status = "cannot be reported"
        with self._going_on("line"):
            status = self._status(device)
        changed = status != self._notified
        if notify(event, *([f"STATUS={status}"] if changed else [])):
            self._notified = status
        return status

    def _extend_start(self, entries: Iterable[ModelEntry]) -> None:
        """systemd ends a start that takes longer than its timeout."""
        builds = [
            f"{entry.name}: {entry.reason}"
            for entry in entries
            if entry.state is ModelState.LOADING and entry.reason
        ]
        if builds:
            status = "; ".join(builds).replace("\n", " ")
            self._notified = status
            notify(f"EXTEND_TIMEOUT_USEC={round(1e6 * START_MORE_S)}", f"STATUS={status}")

    def _report_cameras(self, pipelines: Sequence[LanePipeline], device: DeviceReport) -> None:
        statuses = {pipeline.camera.name: pipeline.camera.status for pipeline in pipelines}
        for name in self._cameras - statuses.keys():
            self._reported.pop(f"camera {name}", None)
            self._reported.pop(f"calibration {name}", None)
            self._publisher.clear_camera(name)
        self._cameras = set(statuses)
        no_lanes = []
        for pipeline in pipelines:
            name, failure = pipeline.camera.name, pipeline.failure
            status = statuses[name]
            well = status.usable or status.state is CameraState.STARTING
            if pipeline.model and (failure or not well):
                no_lanes.append(name)
            calibration = self._publisher.publish_calibration
            of_camera = name, pipeline.calibration, bool(pipeline.model)
            self._attempt(f"calibration {name}", calibration, *of_camera)
            # Faults of other networks by their words alone: numbers change with every frame.
            networks = tuple(
                (each.name, each.failure.partition(":")[0]) for each in pipeline.networks
            )
            # With the number of steps of the clock: `since` is published anew after one.
            values = pipeline, status, failure, networks, device.clock_steps
            self._attempt(f"camera {name}", self._publish_camera, *values)
        self._report_verdicts(pipelines)
        self._attempt("camera events", self._events.see_cameras, statuses)
        reload = self._reload
        waits = ((), "") if reload is None else (tuple(reload.restart_needed), reload.fault)
        self._attempt("online", self._publish_online, tuple(no_lanes), *waits)

    def _report_verdicts(self, pipelines: Sequence[LanePipeline]) -> None:
        """Publish the verdicts on candidates for lanes, and give them to the store."""
        shadows = {
            (pipeline.camera.name, network.name): network
            for pipeline in pipelines
            for network in pipeline.networks
            if network.section.shadow_of is not None
        }
        for camera, name in self._shadows - shadows.keys():
            self._reported.pop(f"verdict {camera}/{name}", None)
            self._publisher.publish_verdict(camera, name, "", "", None)
        self._shadows = set(shadows)
        for (camera, name), network in shadows.items():
            model, verdict = network.section.model, network.verdict
            what = f"{camera}/{name}"
            publish = self._publisher.publish_verdict
            self._attempt(f"verdict {what}", publish, camera, name, model, network.served, verdict)
            self._attempt(f"judged {what}", self._judged, camera, model, network.served, verdict)
            differs = self._events.see_disagreement
            self._attempt(f"differs {what}", differs, camera, model, network.disagreement)

    def _judged(self, camera: str, model: str, served: str, verdict: LaneVerdict | None) -> None:
        self._events.see_verdict(camera, model, verdict)
        if isinstance(self._control, PollControl):
            text = "" if verdict is None else f"{verdict.outcome}: {verdict.text}"
            self._control.deployments.judge(model, served, text)

    def _publish_camera(
        self,
        pipeline: LanePipeline,
        status: CameraStatus,
        failure: str,
        _networks: object,
        _clock_steps: int,
    ) -> None:
        age_s = pipeline.camera.last_frame_age_s(time.monotonic())
        reason, text = pipeline.fault
        self._publisher.publish_camera_status(
            pipeline.camera.name,
            _TOPIC_STATES.get(status.state, "lost"),
            None if age_s is None else round(1e3 * age_s),
            lanes_fail=bool(failure) if pipeline.model else None,
            reason=reason,
            text=text,
            # By the wall clock of now: that of then may have been in 1970.
            since_epoch_ns=time.time_ns() - (time.monotonic_ns() - status.since_mono_ns),
            networks={each.name: each.failure for each in pipeline.networks},
        )

    def _publish_online(
        self, no_lanes: Sequence[str], restart_needed: Sequence[str], fault: str
    ) -> None:
        settings: dict[str, object] = {}
        if restart_needed:
            settings["restart_needed"] = restart_needed
        if fault:
            settings["not_reloaded"] = fault
        self._publisher.publish_online(no_lanes, **settings)

    def _report_device(self, device: DeviceReport) -> None:
        """Publish the update record, and the health of the board every `HEALTH_S` and where its
        report changes."""
        # An update engine writes it at any time: before this daemon starts, and when it commits.
        self._attempt("update", self._publisher.publish_update, self._update.read())
        period = time.monotonic() // HEALTH_S
        self._attempt("health", self._publish_health, device, period)

    def _publish_health(self, device: DeviceReport, _period: float) -> None:
        self._publisher.publish_health(device, self._free_bytes())

    def _report_models(self) -> list[ModelEntry]:
        """Publish the models where they changed; return all of them."""
        entries = self._data_plane.index(only_ready=False)
        self._attempt("models", self._publish_models, entries)
        return entries

    def _publish_models(self, entries: Iterable[ModelEntry]) -> None:
        if isinstance(self._control, PollControl):
            # The model was removed from the repository; on request, an unloaded one may come back.
            entries = [e for e in entries if e.loaded is not None or e.reason != UNLOADED]
        self._publisher.publish_models(entries)

    def _status(self, device: DeviceReport) -> str:
        # The words alone: a temperature beside them would change the line again and again.
        board = "".join(f"; {reason.code}" for reason in device.reasons)
        for report in (each.report for each in self._channels):
            if report.trouble:
                board += f"; channel {report.channel} {report.trouble}"
        entries, now = self._data_plane.index(only_ready=False), time.monotonic()
        broker = self._publisher.state
        pipelines, reload = tuple(self._pipelines), self._reload
        return status_line(entries, pipelines, broker, self._rate, reload, now=now) + board

    def _attempt(self, what: str, report: Callable[..., object], *values: object) -> None:
        """Report `values` where they differ from the last ones of `what` that were reported."""
        if self._reported.get(what) != values:
            with self._going_on(what):
                report(*values)
                self._reported[what] = values

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Log a failure within, once per fault, and go on."""
        try:
            yield
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._faults.get(what):
                self._faults[what] = fault
                log.exception("the daemon's state cannot be reported; it goes on")
