"""The state of the device as the page shows it: one object a second for every page."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.api.http.page.history import History
from edge_server.board.update import RecordFile
from edge_server.pipeline.messages import lane_frame_fields
from edge_server.pipeline.perception import NetworkFrame, marks_of
from edge_server.process.logs import LogTail
from edge_server.process.text import as_utf8, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from edge_server.api.access import AccessRules
    from edge_server.api.http.sources import Sources
    from edge_server.board.board import Identity
    from edge_server.board.watch import DeviceReport
    from edge_server.inference.registry import ModelEntry
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import Event, EventLog
    from edge_server.pipeline.lane_feed import LaneFeed
    from edge_server.pipeline.lane_pipeline import LanePipeline
    from edge_server.pipeline.picture_feed import PictureFeed, Sight
    from edge_server.process.histogram import Distribution

_LONGEST_REASON = 600  # characters
# What is older is elsewhere by now.
_MARKS_NS = 500_000_000


@dataclass(frozen=True)
class PageSources:
    """The parts of the daemon that the page shows.

    Attributes:
        vehicle_width_m: between the outer edges of its front wheels.
        update: of the record of the last update of the system.
        may_read: returns whether a token lets its owner read; None where nobody needs a token.
        rules: of HTTP; None allows everyone to record, and to see the log and the settings.
        log: its newest lines.
        settings: returns all of them as (name, value as JSON, is default), without secrets.
    """

    identity: Identity
    parts: Sources
    pictures: PictureFeed
    events: EventLog
    vehicle_width_m: float = 1.9
    update: RecordFile = field(default_factory=RecordFile)
    may_read: Callable[[str], bool] | None = None
    rules: AccessRules | None = None
    history: History = field(default_factory=History)
    log: LogTail = field(default_factory=LogTail)
    settings: Callable[[], Iterable[tuple[str, str, bool]]] = tuple


def state_text(sources: PageSources) -> str:
    """Return the present state as JSON; opens no file but those of /proc and the record of an
    update, and waits for nobody."""
    parts, now_s = sources.parts, time.monotonic()
    answered = parts.latency.end_to_end()
    state = {
        "type": "state",
        "device": sources.identity.device,
        "version": sources.identity.version,
        "uptime_s": round(now_s - parts.started_s),
        "epoch_ms": time.time_ns() // 1_000_000,
        "mono_ms": round(1e3 * now_s),
        "vehicle_width_m": sources.vehicle_width_m,
        "earlier_events": sources.events.earlier,
        "log_id": sources.log.last_id,
        "samples": sources.history.samples,
        "cameras": [_camera(each, answered, parts, now_s) for each in tuple(parts.pipelines)],
        "models": [_model(entry) for entry in parts.models()],
        "broker": _broker(parts),
        "repository": _repository(parts, now_s),
        "recorder": _recorder(parts),
        "settings": _settings(parts),
        "processors": None if parts.processors is None else parts.processors.utilization(),
        "board": None if parts.board is None else _board(parts.board.report),
        "free_bytes": parts.free_bytes(),
        "update": msgspec.to_builtins(sources.update.read()),
    }
    return msgspec.json.encode(state).decode()


def events_text(events: list[Event]) -> str:
    """Return `events` as JSON."""
    return msgspec.json.encode({"type": "events", "events": [_event(e) for e in events]}).decode()


def _event(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "begin_id": event.begin_id,
        "kind": event.kind,
        "phase": event.phase,
        "cause": event.cause,
        "text": event.text[:_LONGEST_REASON],
        "camera": event.camera,
        "model": event.model,
        "epoch_ms": event.epoch_ns // 1_000_000,
    }


def _camera(
    pipeline: LanePipeline,
    answered: Mapping[tuple[str, ...], Distribution],
    parts: Sources,
    now_s: float,
) -> dict[str, Any]:
    camera, status = pipeline.camera, pipeline.camera.status
    counted = answered.get((camera.name,))
    return {
        "name": camera.name,
        "state": status.state.value,
        "reason": status.reason,
        "text": _shortened(status.text),
        "usable": status.usable,
        "since_s": round(now_s - status.since_mono_ns / 1e9, 1),
        "failure": _shortened(pipeline.failure),
        "model": pipeline.model,
        "captured": camera.captured,
        "with_lanes": 0 if counted is None else counted.at_most[-1],
        "dropped": camera.dropped + pipeline.too_old_frames,
        "frame_age_s": camera.last_frame_age_s(now_s),
        "lanes_age_s": parts.latency.last_valid_age_s(camera.name),
        "calibrated": pipeline.calibration is not None,
        "networks": [
            {
                "name": each.name,
                "model": each.section.model,
                "task": each.model.task or "",
                "failure": _shortened(each.failure),
                "frames": each.frames,
                "missed": sum(each.missed.values()),
                "age_ms": round(each.age_ms),
                "shadow": each.section.shadow_of is not None,
                "verdict": "" if each.verdict is None else each.verdict.outcome,
                "verdict_text": "" if each.verdict is None else _shortened(each.verdict.text),
            }
            for each in pipeline.networks
        ],
    }


def _model(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": as_utf8(entry.name),
        "version": entry.version,
        "state": "IDLE" if entry.is_idle else entry.state.value,
        "reason": _shortened(entry.reason),
        "configuration": _shortened(str(entry.configuration or "")),
        "degraded": bool(entry.configuration and entry.configuration.degraded),
    }


def _broker(parts: Sources) -> dict[str, Any] | None:
    broker = parts.broker
    if broker is None or not broker.on:
        return None
    return {
        "connected": broker.connected,
        "state": _shortened(broker.state),
        "waiting": broker.waiting,
        "dropped": broker.dropped,
    }


def _repository(parts: Sources, now_s: float) -> dict[str, Any] | None:
    repository = parts.repository
    if repository is None:
        return None
    return {
        "age_s": repository.poll_age_s(now_s),
        "outcomes": dict(repository.deployments.outcomes()),
    }


def _recorder(parts: Sources) -> dict[str, Any] | None:
    recorder = parts.recorder
    if recorder is None:
        return None
    return {
        "failure": _shortened(recorder.failure),
        "written_bytes": recorder.written_bytes,
        "dropped": recorder.dropped + recorder.lost,
    }


def _settings(parts: Sources) -> dict[str, Any] | None:
    settings = parts.settings
    if settings is None:
        return None
    return {"fault": _shortened(settings.fault), "restart_needed": list(settings.restart_needed)}


def _board(report: DeviceReport) -> dict[str, Any]:
    facts = report.facts
    known: dict[str, Any] = {
        "reasons": [_shortened(str(reason)) for reason in report.reasons],
        "clock": report.clock.value,
    }
    if facts is None:
        return known
    memory = facts.memory
    return {
        **known,
        "power_mode": facts.power_mode,
        "engines": [
            {"name": engine.name, "load": engine.load, "hz": engine.now_hz}
            for engine in facts.engines
        ],
        "zones": [
            {"name": zone.name, "celsius": zone.celsius, "throttle": zone.throttle_celsius}
            for zone in facts.heat.zones
        ],
        "rails": [{"name": rail.name, "watts": rail.watts} for rail in facts.rails],
        "memory_bytes": memory.total_bytes,
        "available_bytes": memory.available_bytes,
        "uptime_s": facts.uptime_s,
    }


def _shortened(text: str) -> str:
    return as_utf8(shortened(text, _LONGEST_REASON))


_QUALITY = 78


class PictureWriter:
    """Writes pictures of the cameras; for one thread.

    Args:
        identity: of this device.
        networks: what other networks have found; None shows nothing of them.
    """

    def __init__(self, identity: Identity, networks: LaneFeed | None = None) -> None:
        self._identity = identity
        self._networks = networks
        self._seq = itertools.count()

    def __call__(self, sight: Sight, width: int) -> bytes:
        """Return the size of the JSON in four bytes, big endian, the JSON, and the JPEG.

        The JSON is a `LaneFrame` message, see docs/mqtt.md, without the ground points, whose
        polynomials it has, and with `marks`: what other networks have found in frames of the last
        half second. Its age is that of the moment at which the lanes were known.
        A picture wider than `width` (px) is made so small.
        """
        # OpenCV comes with the first camera, and takes long to import.
        from edge_server.cameras.jpeg import jpeg_of  # noqa: PLC0415

        fields = lane_frame_fields(sight.lane_frame, self._identity, next(self._seq), sight.seen_ns)
        for lane in fields["lanes"]:
            if "ground" in lane:
                del lane["ground"]["points"]
        fields["marks"] = self._marks(sight.lane_frame)
        text = msgspec.json.encode(fields)
        return b"".join((len(text).to_bytes(4, "big"), text, jpeg_of(sight.frame, _QUALITY, width)))

    def _marks(self, lane_frame: LaneFrame) -> list[dict[str, Any]]:
        found = [] if self._networks is None else self._networks.newest_of(lane_frame.camera)
        marks = [
            mark
            for message in found
            if isinstance(frame := message.frame, NetworkFrame)
            and lane_frame.capture_mono_ns - frame.capture_mono_ns < _MARKS_NS
            for mark in marks_of(frame)
        ]
        return [
            {"points": points.round(1).tolist(), "text": text, "rgb": rgb, "filled": filled}
            for points, text, rgb, filled in marks
        ]
