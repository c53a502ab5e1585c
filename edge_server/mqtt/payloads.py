"""Encodes the daemon's values as the bytes of MQTT messages: pure functions.

Lanes are the proto3 JSON mapping of `edge/lanes/v1/lanes.proto`, of which
`scripts/generate_proto` also makes the published JSON Schema. The points of a lane are two
columns, `{"x": [...], "y": [...]}`, as in openpilot: a reader plots or stacks them without index
arithmetic (nested pairs have no proto3 JSON mapping), they take half the bytes of a list of
`{"x": .., "y": ..}`, and numpy yields them in one call instead of a loop over points.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from edge_server.board.update_record import UpdateRecord
    from edge_server.lanes.types import Ego, GroundLane, Lane, LaneFrame
    from edge_server.mqtt.topics import Identity
    from edge_server.pipeline.events import Event

CONTENT_TYPE = "application/json"
SCHEMA = "edge.lanes/1"
EVENT_SCHEMA = "edge.event/1"

CameraState = Literal["ok", "degraded", "stalled", "frozen", "lost"]
DeviceState = Literal["starting", "online", "offline"]

_UINT32 = 2**32
_LONGEST_REASON = 500  # characters of a text that is sent with every frame
_UPPER = np.triu_indices(4)
_OF_UPDATE = ("slot", "state", "target", "result", "engine")
_encode = msgspec.json.Encoder().encode


def lane_frame(frame: LaneFrame, identity: Identity, seq: int, now_mono_ns: int) -> bytes:
    """Return the JSON of `frame`, with its age at `now_mono_ns`.

    A frame whose request failed, or whose camera shows no road, has FRAME_STATUS_INVALID and no
    lanes. A lane with a non-finite coordinate or score is left out and named in `reasons`: JSON has
    no such numbers, and no vehicle may steer by them.

    Args:
        frame: the pipeline's result.
        identity: of this device.
        seq: count of this message on its topic, dropped ones included.
        now_mono_ns: `time.monotonic_ns()` of the publish.
    """
    age_us = max(0, frame.age_ns(now_mono_ns)) // 1000
    lanes = [_lane(lane) for lane in frame.lanes if _finite(lane)]
    status = "FRAME_STATUS_OK"
    reasons = []
    if len(lanes) < len(frame.lanes):
        status = "FRAME_STATUS_DEGRADED"
        reasons.append("lane_not_finite")
    if frame.degraded:
        status = "FRAME_STATUS_DEGRADED"
        reasons += [as_utf8(reason[:_LONGEST_REASON]) for reason in frame.degraded]
    if age_us > 1000 * frame.max_age_ms:
        status = "FRAME_STATUS_STALE"
        reasons.append("age")
    if frame.failure:
        status = "FRAME_STATUS_INVALID"
        reasons.append(as_utf8(f"{frame.failure_reason}: {frame.failure}"[:_LONGEST_REASON]))
    ego = {} if frame.ego is None else {"ego": _ego(frame.ego)}
    return _encode(
        {
            "schema": SCHEMA,
            "device": identity.device,
            "camera": frame.camera,
            "boot_id": identity.boot_id,
            "frame_id": frame.frame_id % _UINT32,
            "seq": seq % _UINT32,
            "dropped": frame.dropped % _UINT32,
            "status": status,
            "reasons": reasons,
            # The proto3 JSON mapping writes 64-bit integers as strings: a double holds only 53
            # bits of them.
            "time": {
                "capture_mono_ns": str(frame.capture_mono_ns),
                "capture_epoch_ns": str(frame.capture_epoch_ns),
                "capture_time": rfc3339(frame.capture_epoch_ns),
                "age_us": min(age_us, _UINT32 - 1),
                "clock": {
                    "source": f"CLOCK_SOURCE_{frame.clock.upper()}",
                    "uncertainty_us": min(frame.uncertainty_ns // 1000, _UINT32 - 1),
                },
                "wall_clock": f"WALL_CLOCK_{frame.wall_clock.upper()}",
            },
            "latency_us": frame.latency_us,
            "image": {"width": frame.width, "height": frame.height},
            "model": {"name": frame.model_name, "version": frame.model_version},
            "lanes": lanes,
            **ego,
            "calib_id": as_utf8(frame.calibration_id),
        }
    )


def status(identity: Identity, state: DeviceState, **more: Any) -> bytes:
    """Return the `status` payload; that of `offline` is also the last will, so it has no time.

    Args:
        identity: of this device.
        state: `starting` while the daemon loads its first models; `online` until it stops, with
            `no_lanes`, the cameras without lanes at present.
        more: further fields: `restart_needed`, the settings that wait for a restart, and
            `not_reloaded`, why the last reload of the settings changed nothing; each where it is
            so.
    """
    return _encode({"state": state, "version": identity.version, **more})


def meta(identity: Identity) -> bytes:
    """Return the device's name and version, and the schema of its messages."""
    return _encode(
        {
            "device": identity.device,
            "version": identity.version,
            "boot_id": identity.boot_id,
            "schemas": [SCHEMA, EVENT_SCHEMA],
        }
    )


def update(identity: Identity, record: UpdateRecord) -> bytes:
    """Return the version that runs, its slot, and what became of the last update.

    Args:
        identity: of this device; `version` is the one that runs.
        record: `slot` is empty on a device without slots; `changed_s` is 0 before any update.
    """
    since = rfc3339(record.changed_s * 1_000_000_000) if record.changed_s else ""
    fields = {name: as_utf8(getattr(record, name)) for name in _OF_UPDATE}
    return _encode({"version": identity.version, **fields, "since": since})


def camera_status(
    state: CameraState,
    last_frame_age_ms: int | None,
    failure: str = "",
    *,
    failure_reason: str = "model_failed",
    reason: str = "",
    text: str = "",
    since_epoch_ns: int = 0,
) -> bytes:
    """Return whether a camera delivers usable frames, and whether its frames get lanes.

    Args:
        state: `degraded` is for frames that arrive with a fault, whatever they are worth.
        last_frame_age_ms: None before its first frame.
        failure: why the model returns no lanes; empty while it does.
        failure_reason: the same in a word.
        reason: a word of `CameraStatus`; where it is empty and lanes fail, `failure_reason` is
            sent.
        text: the same for people; where lanes fail without a reason of the camera, `failure`.
        since_epoch_ns: when the camera's state began.
    """
    if failure and not reason:
        reason, text = failure_reason, failure
    return _encode(
        {
            "state": state,
            "last_frame_age_ms": last_frame_age_ms,
            "lanes": "failing" if failure else "ok",
            "reason": reason,
            "text": as_utf8(text),
            "since": rfc3339(since_epoch_ns),
        }
    )


def model_state(name: str, state: str, reason: str) -> bytes:
    """Return whether a model serves, and the reason if it does not."""
    return _encode({"model": as_utf8(name), "state": state, "reason": as_utf8(reason)})


def event(event: Event, identity: Identity) -> bytes:
    """Return the JSON of an event: the proto3 JSON mapping of `edge/lanes/v1/events.proto`."""
    optional = {
        "frame_id": None if event.frame_id is None else event.frame_id % _UINT32,
        "distance_to_line_m": _rounded(event.distance_to_line_m),
        "time_to_line_s": _rounded(event.time_to_line_s),
    }
    return _encode(
        {
            "schema": EVENT_SCHEMA,
            "device": identity.device,
            "boot_id": identity.boot_id,
            # The mapping writes 64-bit integers as strings.
            "id": str(event.id),
            "kind": f"EVENT_KIND_{event.kind.upper()}",
            "phase": f"EVENT_PHASE_{event.phase.upper()}",
            "begin_id": str(event.begin_id),
            "camera": event.camera,
            "model": as_utf8(event.model),
            "model_version": as_utf8(event.model_version),
            "cause": as_utf8(event.cause),
            "text": as_utf8(event.text[:_LONGEST_REASON]),
            "mono_ns": str(event.mono_ns),
            "epoch_ns": str(event.epoch_ns),
            "time": rfc3339(event.epoch_ns),
            **{name: value for name, value in optional.items() if value is not None},
        }
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _finite(lane: Lane) -> bool:
    if not (math.isfinite(lane.score) and np.isfinite(lane.points).all()):
        return False
    if lane.ground is None:
        return True
    polynomial = lane.ground.polynomial
    numbers = (lane.ground.points, polynomial.coefficients, polynomial.covariance)
    return all(np.isfinite(each).all() for each in numbers)


def _lane(lane: Lane) -> dict[str, Any]:
    # Rounded as float64: a rounded float32 would print as 103.4000015258789.
    x, y = np.round(lane.points.T.astype(np.float64), 1).tolist()
    ground = {} if lane.ground is None else {"ground": _ground(lane.ground)}
    return {
        "id": lane.id,
        "index": lane.index,
        "confidence": round(float(lane.score), 4),
        "type": f"MARKING_TYPE_{lane.type.upper()}",
        "color": f"MARKING_COLOR_{lane.color.upper()}",
        "image_points": {"x": x, "y": y},
        **ground,
        "predicted": lane.predicted,
    }


def _ground(ground: GroundLane) -> dict[str, Any]:
    x, y = np.round(ground.points.T.astype(np.float64), 2).tolist()
    polynomial = ground.polynomial
    c0, c1, c2, c3 = polynomial.coefficients.tolist()
    return {
        "points": {"x": x, "y": y},
        "polynomial": {
            "c0": c0,
            "c1": c1,
            "c2": c2,
            "c3": c3,
            "x_min_m": round(polynomial.x_min_m, 2),
            "x_max_m": round(polynomial.x_max_m, 2),
            "covariance": polynomial.covariance[_UPPER].tolist(),
        },
    }


def _ego(ego: Ego) -> dict[str, Any]:
    measured = {
        "lateral_offset_m": ego.lateral_offset_m,
        "lateral_offset_std_m": ego.lateral_offset_std_m,
        "heading_error_rad": ego.heading_error_rad,
        "curvature_1pm": ego.curvature_1pm,
        "lane_width_m": ego.lane_width_m,
    }
    known = {name: round(value, 6) for name, value in measured.items() if value is not None}
    return {**known, "lane_change": f"LANE_CHANGE_{ego.lane_change.upper()}"}


def rfc3339(epoch_ns: int) -> str:
    """Return the time as `2026-01-31T12:00:00.000000Z`."""
    seconds, ns = divmod(epoch_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{ns // 1000:06d}Z"
