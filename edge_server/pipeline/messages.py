"""The messages of `edge/lanes/v1` and `edge/perception/v1`, made of the daemon's values.

What leaves on MQTT and over gRPC is made here alone. A message is first the fields of its protobuf,
as nested dictionaries: of those a protobuf is made in one step, and JSON by the proto3 mapping, of
which `scripts/generate_proto` also makes the published JSON Schema. The points of a lane are two
columns, `{"x": [...], "y": [...]}`, as in openpilot: a reader plots or stacks them without index
arithmetic (nested pairs have no proto3 JSON mapping), they take half the bytes of a list of
`{"x": .., "y": ..}`, and numpy yields them in one call instead of a loop over points.
"""

from __future__ import annotations

import time
from functools import cached_property
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from edge_server.errors import Reason
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.perception import (
    Classification,
    Detections,
    NetworkFrame,
    Segmentation,
    TensorList,
)
from edge_server.process.text import as_utf8
from edge_server.proto.edge.lanes.v1 import events_pb2, lane_service_pb2, lanes_pb2
from edge_server.proto.edge.perception.v1 import perception_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from edge_server.board.board import Identity
    from edge_server.cameras.calibration import Calibration
    from edge_server.lanes.types import Ego, Lane
    from edge_server.pipeline.event_log import Event
    from edge_server.settings.sections import PayloadFormat

LANES_SCHEMA = "edge.lanes/1"
PERCEPTION_SCHEMA = "edge.perception/1"
EVENT_SCHEMA = "edge.event/1"

_UINT32 = 2**32
_LONGEST_REASON = 500  # characters of a text that is sent with every frame or event
_CODES = frozenset(lanes_pb2.ReasonCode.keys()[1:])
_UPPER = np.triu_indices(4)
_encode = msgspec.json.Encoder().encode


def timestamp(epoch_ns: int) -> dict[str, int]:
    """Return the fields of a Timestamp, cut to microseconds."""
    seconds, ns = divmod(epoch_ns, 1_000_000_000)
    return {"seconds": seconds, "nanos": ns // 1000 * 1000}


def rfc3339(epoch_ns: int) -> str:
    """Return the time as `2026-01-31T12:00:00.000000Z`."""
    seconds, ns = divmod(epoch_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{ns // 1000:06d}Z"


class Judgement(NamedTuple):
    """What the lanes of a frame are worth at one moment.

    Attributes:
        age_us: since the capture.
    """

    status: str
    reasons: list[Reason]
    age_us: int


def judge(frame: LaneFrame, now_mono_ns: int, *, complete: bool) -> Judgement:
    """Return what `frame` is worth when it is sent.

    Args:
        complete: every lane of the frame is in the message.
    """
    age_us = max(0, frame.age_ns(now_mono_ns)) // 1000
    status = "FRAME_STATUS_OK"
    reasons = []
    if not complete:
        status = "FRAME_STATUS_DEGRADED"
        reasons.append(Reason("lane_not_finite"))
    if frame.degraded:
        status = "FRAME_STATUS_DEGRADED"
        reasons += frame.degraded
    if age_us > 1000 * frame.max_age_ms:
        status = "FRAME_STATUS_STALE"
        reasons.append(Reason("age"))
    if frame.failure:
        status = "FRAME_STATUS_INVALID"
        reasons.append(Reason(frame.failure_reason, frame.failure))
    return Judgement(status, reasons, min(age_us, _UINT32 - 1))


def reason_fields(reasons: Sequence[Reason]) -> dict[str, Any]:
    """Return the fields that say why a status is not OK: `reasons` and `reason_details`."""
    return {
        "reasons": [as_utf8(str(reason)[:_LONGEST_REASON]) for reason in reasons],
        "reason_details": [
            {"code": _code(code), "text": as_utf8(text[:_LONGEST_REASON])} for code, text in reasons
        ],
    }


def _code(word: str) -> str:
    name = f"REASON_CODE_{word.upper()}"
    return name if name in _CODES else "REASON_CODE_OTHER"


def lane_frame_fields(
    frame: LaneFrame,
    identity: Identity,
    seq: int,
    now_mono_ns: int,
    capture_time: Callable[[int], object] = timestamp,
) -> dict[str, Any]:
    """Return the fields of a `LaneFrame` message, with its age at `now_mono_ns`.

    A frame whose request failed, or whose camera shows no road, has FRAME_STATUS_INVALID and no
    lanes. A lane with a non-finite coordinate or score is left out and named in `reasons`: JSON has
    no such numbers, and no vehicle may steer by them.

    Args:
        seq: count of this message, dropped ones included.
        capture_time: writes the Unix time of the capture, in ns.
    """
    lanes = _lanes(frame.lanes)
    complete = len(lanes) == len(frame.lanes)
    status, reasons, age_us = judge(frame, now_mono_ns, complete=complete)
    ego = {} if frame.ego is None else {"ego": _ego(frame.ego)}
    vehicle = {}
    if (used := frame.vehicle) is not None:
        measured = {
            "speed_mps": used.speed_mps,
            "yaw_rate_radps": used.yaw_rate_radps,
            "indicator": None
            if used.indicator == "unknown"
            else f"INDICATOR_{used.indicator.upper()}",
            "age_us": (frame.capture_mono_ns - used.mono_ns) // 1000,
        }
        vehicle = {"vehicle": {name: each for name, each in measured.items() if each is not None}}
    latency = frame.latency_us
    return {
        "schema": LANES_SCHEMA,
        "device": identity.device,
        "camera": frame.camera,
        "boot_id": identity.boot_id,
        "frame_id": frame.frame_id % _UINT32,
        "seq": seq % _UINT32,
        "dropped": frame.dropped % _UINT32,
        "status": status,
        **reason_fields(reasons),
        "time": {
            "capture_mono_ns": frame.capture_mono_ns,
            "capture_epoch_ns": frame.capture_epoch_ns,
            "capture_time": capture_time(frame.capture_epoch_ns),
            "age_us": age_us,
            "clock": {
                "source": f"CLOCK_SOURCE_{frame.clock.upper()}",
                "uncertainty_us": min(frame.uncertainty_ns // 1000, _UINT32 - 1),
            },
            "wall_clock": f"WALL_CLOCK_{frame.wall_clock.upper()}",
        },
        "latency_us": {
            "queue": latency.queue,
            "preprocess": latency.preprocess,
            "infer": latency.infer,
            "postprocess": latency.postprocess,
        },
        "image": {"width": frame.width, "height": frame.height},
        "model": {"name": frame.model_name, "version": frame.model_version},
        "lanes": lanes,
        **ego,
        "calib_id": frame.calibration_id,
        **vehicle,
    }


def network_frame_fields(
    frame: NetworkFrame,
    identity: Identity,
    seq: int,
    now_mono_ns: int,
    capture_time: Callable[[int], object] = timestamp,
) -> dict[str, Any]:
    """Return the fields of a `NetworkFrame` message; see `lane_frame_fields`."""
    fields = lane_frame_fields(frame, identity, seq, now_mono_ns, capture_time)
    del fields["lanes"]
    fields |= {
        "schema": PERCEPTION_SCHEMA,
        "network": frame.network,
        "task": f"TASK_{frame.task.upper()}",
    }
    match frame.result:
        case Detections():
            fields["detections"] = _objects(frame.result)
        case Segmentation():
            fields["segmentation"] = _mask(frame.result)
        case Classification(classes, labels):
            fields["classes"] = [
                {**_class(each, labels), "confidence": round(score, 4)} for each, score in classes
            ]
        case TensorList(tensors):
            fields["tensors"] = [
                {"name": as_utf8(name), "datatype": datatype, "shape": shape}
                for name, datatype, shape in tensors
            ]
        case tuple():
            fields["lanes"] = _lanes(frame.result)
    return fields


def _class(class_id: int, labels: Sequence[str]) -> dict[str, Any]:
    label = as_utf8(labels[class_id]) if class_id < len(labels) else ""
    return {"class_id": class_id, "label": label}


def _box(x_min: float, y_min: float, x_max: float, y_max: float) -> dict[str, float]:
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


def _objects(found: Detections) -> list[dict[str, Any]]:
    """Return the fields of a `Detection` message for each object."""
    ids = [0] * len(found.boxes) if found.ids is None else found.ids.tolist()
    objects = [
        {
            "box": _box(*box),
            **_class(class_id, found.labels),
            "confidence": round(score, 4),
            "track_id": track_id,
        }
        for box, class_id, score, track_id in zip(
            found.boxes.round(1).tolist(),
            found.classes.tolist(),
            found.scores.tolist(),
            ids,
            strict=True,
        )
    ]
    if found.ground is not None and found.covariance is not None:
        for row in np.flatnonzero(np.isfinite(found.ground).all(axis=1)).tolist():
            x_m, y_m = found.ground[row].round(2).tolist()
            (xx, xy), (_, yy) = found.covariance[row].tolist()
            objects[row]["ground"] = {"x_m": x_m, "y_m": y_m, "covariance": [xx, xy, yy]}
    return objects


def _mask(found: Segmentation) -> dict[str, Any]:
    region = found.region
    right, bottom = region.x + region.width, region.y + region.height
    outlines = []
    for class_id, points in found.polygons:
        x, y = points.T.round(1).tolist()
        outlines.append({"class_id": class_id, "x": x, "y": y})
    return {
        "region": _box(region.x, region.y, right, bottom),
        "columns": found.size[0],
        "rows": found.size[1],
        "run_classes": found.run_classes.tolist(),
        "run_lengths": found.run_lengths.tolist(),
        "outlines": outlines,
        "labels": [as_utf8(label) for label in found.labels],
    }


def frame_payload(
    frame: LaneFrame,
    identity: Identity,
    seq: int,
    now_mono_ns: int,
    payload: PayloadFormat = "json",
) -> bytes:
    """Return the message of `frame`, a NetworkFrame too, with its age at `now_mono_ns`.

    Args:
        seq: count of this message on its topic, dropped ones included.
    """
    kind, fields_of = _FORMS[type(frame)]
    if payload == "protobuf":
        binary: bytes = kind(**fields_of(frame, identity, seq, now_mono_ns)).SerializeToString()
        return binary
    fields = fields_of(frame, identity, seq, now_mono_ns, rfc3339)
    # As the proto3 JSON mapping has it: a double holds only 53 bits of a 64-bit integer.
    for name in ("capture_mono_ns", "capture_epoch_ns"):
        fields["time"][name] = str(fields["time"][name])
    return _encode(fields)


# The kind of a frame's protobuf, and what makes its fields.
_FORMS: Mapping[type[LaneFrame], tuple[Any, Callable[..., dict[str, Any]]]] = MappingProxyType(
    {
        LaneFrame: (lanes_pb2.LaneFrame, lane_frame_fields),
        NetworkFrame: (perception_pb2.NetworkFrame, network_frame_fields),
    }
)


class LaneMessage(msgspec.Struct, dict=True, eq=False):
    """The message of one frame for any number of readers; safe from any thread.

    Attributes:
        seq: count of this message, dropped ones included.
    """

    frame: LaneFrame
    identity: Identity
    seq: int

    def sent_at(self, now_mono_ns: int) -> Any:
        """Return the protobuf, a LaneFrame or a NetworkFrame, with its age and its worth at
        `now_mono_ns`."""
        complete, kind, written = self._lasting
        status, reasons, age_us = judge(self.frame, now_mono_ns, complete=complete)
        # Parsing takes a twentieth of the time of making the lanes anew for each reader.
        message = kind.FromString(written)
        message.status = lanes_pb2.FrameStatus.Value(status)
        fields = reason_fields(reasons)
        message.reasons[:] = fields["reasons"]
        message.ClearField("reason_details")
        message.reason_details.extend(
            lanes_pb2.Reason(**details) for details in fields["reason_details"]
        )
        message.time.age_us = age_us
        return message

    @cached_property
    def _lasting(self) -> tuple[bool, Any, bytes]:
        """Whether every lane is in the message; its kind; and the message at the capture."""
        frame = self.frame
        kind, fields_of = _FORMS[type(frame)]
        fields = fields_of(frame, self.identity, self.seq, frame.capture_mono_ns)
        complete = isinstance(frame, NetworkFrame) or len(fields["lanes"]) == len(frame.lanes)
        return complete, kind, kind(**fields).SerializeToString()


def event_message(event: Event, identity: Identity) -> events_pb2.Event:
    return events_pb2.Event(
        schema=EVENT_SCHEMA,
        device=identity.device,
        boot_id=identity.boot_id,
        id=event.id,
        kind=f"EVENT_KIND_{event.kind.upper()}",
        phase=f"EVENT_PHASE_{event.phase.upper()}",
        begin_id=event.begin_id,
        camera=event.camera,
        model=as_utf8(event.model),
        model_version=as_utf8(event.model_version),
        cause=as_utf8(event.cause),
        text=as_utf8(event.text[:_LONGEST_REASON]),
        mono_ns=event.mono_ns,
        epoch_ns=event.epoch_ns,
        time=timestamp(event.epoch_ns),
        log=event.log,
        frame_id=None if event.frame_id is None else event.frame_id % _UINT32,
        distance_to_line_m=_rounded(event.distance_to_line_m),
        time_to_line_s=_rounded(event.time_to_line_s),
        cause_code=_code(event.cause),
    )


def calibration_message(calibration: Calibration) -> lane_service_pb2.Calibration:
    lens, mounting = calibration.model.lens, calibration.model.mounting
    return lane_service_pb2.Calibration(
        id=calibration.id,
        lens=lens.kind,
        width=lens.width,
        height=lens.height,
        fx=lens.fx,
        fy=lens.fy,
        cx=lens.cx,
        cy=lens.cy,
        distortion=lens.distortion,
        height_m=mounting.height_m,
        pitch_rad=mounting.pitch_rad,
        yaw_rad=mounting.yaw_rad,
        roll_rad=mounting.roll_rad,
        x_m=mounting.x_m,
        y_m=mounting.y_m,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _lanes(lanes: Iterable[Lane]) -> list[dict[str, Any]]:
    """Return the fields of each lane whose numbers are all finite."""
    fields = []
    for lane in lanes:
        # Rounded as float64: a rounded float32 would print as 103.4000015258789.
        x, y = lane.points.T.astype(np.float64).round(1).tolist()
        numbers = [lane.score, *x, *y]
        of_lane: dict[str, Any] = {
            "id": lane.id,
            "index": lane.index,
            "confidence": round(lane.score, 4),
            "type": f"MARKING_TYPE_{lane.type.upper()}",
            "color": f"MARKING_COLOR_{lane.color.upper()}",
            "image_points": {"x": x, "y": y},
        }
        if (ground := lane.ground) is not None:
            x, y = ground.points.T.astype(np.float64).round(2).tolist()
            polynomial = ground.polynomial
            c0, c1, c2, c3 = polynomial.coefficients.tolist()
            covariance = polynomial.covariance[_UPPER].tolist()
            numbers += [*x, *y, c0, c1, c2, c3, *covariance]
            of_lane["ground"] = {
                "points": {"x": x, "y": y},
                "polynomial": {
                    "c0": c0,
                    "c1": c1,
                    "c2": c2,
                    "c3": c3,
                    "x_min_m": round(polynomial.x_min_m, 2),
                    "x_max_m": round(polynomial.x_max_m, 2),
                    "covariance": covariance,
                },
            }
        of_lane["predicted"] = lane.predicted
        if isfinite(sum(numbers)):
            fields.append(of_lane)
    return fields


def _ego(ego: Ego) -> dict[str, Any]:
    measured = {
        "lateral_offset_m": ego.lateral_offset_m,
        "lateral_offset_std_m": ego.lateral_offset_std_m,
        "heading_error_rad": ego.heading_error_rad,
        "curvature_1pm": ego.curvature_1pm,
        "lane_width_m": ego.lane_width_m,
        "heading_error_std_rad": ego.heading_error_std_rad,
        "curvature_std_1pm": ego.curvature_std_1pm,
        "lane_width_std_m": ego.lane_width_std_m,
    }
    known = {name: round(value, 6) for name, value in measured.items() if value is not None}
    fields: dict[str, Any] = {**known, "lane_change": f"LANE_CHANGE_{ego.lane_change.upper()}"}
    if (departure := ego.departure) is not None:
        fields["departure"] = {
            "state": f"DEPARTURE_STATE_{departure.state.upper()}",
            "side": "" if departure.side == "none" else departure.side,
            "withheld_by": departure.withheld_by,
            "side_code": f"DEPARTURE_SIDE_{departure.side.upper()}",
            "withheld_by_code": f"WITHHELD_BY_{(departure.withheld_by or 'none').upper()}",
        }
    for side, line in (("left", ego.left), ("right", ego.right)):
        if line is not None:
            time_s = {} if line.time_s is None else {"time_s": round(line.time_s, 3)}
            fields[side] = {
                "distance_m": round(line.distance_m, 3),
                "distance_std_m": round(line.std_m, 4),
                **time_s,
            }
    return fields
