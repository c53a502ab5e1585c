"""Encodes the daemon's values as the bytes of MQTT messages: pure functions.

Lanes are the proto3 JSON mapping of `edge/lanes/v1/lanes.proto`, of which
`scripts/generate_proto` also makes the published JSON Schema. The points of a lane are two
columns, `{"x": [...], "y": [...]}`, as in openpilot: a reader plots or stacks them without index
arithmetic (nested pairs have no proto3 JSON mapping), they take half the bytes of a list of
`{"x": .., "y": ..}`, and numpy yields them in one call instead of a loop over points.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from edge_server.errors import InvalidRequest
from edge_server.pipeline.messages import (
    EVENT_SCHEMA,
    LANES_SCHEMA,
    calibration_message,
    event_fields,
    lane_frame_fields,
)
from edge_server.pipeline.vehicle import VehicleState, vehicle_state
from edge_server.process.utf8 import as_utf8
from edge_server.proto.edge.lanes.v1 import events_pb2, lane_service_pb2, lanes_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.board.identity import Identity
    from edge_server.board.update import UpdateRecord
    from edge_server.cameras.calibration import Calibration
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import Event
    from edge_server.settings.sections import PayloadFormat

PREFIX = "edge/v1"

_NAME = re.compile(r"[a-z0-9_-]{1,64}", re.ASCII)
# Model names are the repository's, and Triton's allow capitals: `laneDetect_model`.
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Topics:
    """The topics of one device; every name in them is safe as one level of a topic.

    Raises:
        ValueError: an unsafe name; the text names it and the remedy. The methods raise it too.
    """

    device: str

    def __post_init__(self) -> None:
        _check("device", self.device, _NAME, "a-z, 0-9, '_' and '-'")

    @property
    def status(self) -> str:
        """Retained: online or offline; the broker publishes offline as the last will."""
        return f"{PREFIX}/{self.device}/status"

    @property
    def meta(self) -> str:
        """Retained, the birth message: versions, schemas, cameras and models."""
        return f"{PREFIX}/{self.device}/meta"

    @property
    def health(self) -> str:
        """Retained: temperatures, power, clocks and drives of the board."""
        return f"{PREFIX}/{self.device}/health"

    @property
    def update(self) -> str:
        """Retained: version, slot, and what became of the last update."""
        return f"{PREFIX}/{self.device}/update"

    @property
    def plans(self) -> str:
        """Retained: how far the builds of TensorRT plans are, by `edge-server plan refresh`."""
        return f"{PREFIX}/{self.device}/plans"

    @property
    def acknowledged(self) -> str:
        """Retained: the id of the newest event that the broker has acknowledged."""
        return f"{PREFIX}/{self.device}/acknowledged"

    @property
    def vehicle(self) -> str:
        """Never retained, for others to publish: what the vehicle measures of itself."""
        return f"{PREFIX}/{self.device}/vehicle"

    def lanes(self, camera: str) -> str:
        """Live, never retained: the lanes of every frame."""
        return f"{self._camera(camera)}/lanes"

    def camera_status(self, camera: str) -> str:
        """Retained: whether the camera delivers."""
        return f"{self._camera(camera)}/status"

    def calibration(self, camera: str) -> str:
        """Retained: how the camera sees and is mounted; empty where it has no calibration."""
        return f"{self._camera(camera)}/calibration"

    def event(self, kind: str, camera: str = "") -> str:
        """Never retained, at least once: what begins and ends; of a camera, or of the device."""
        root = self._camera(camera) if camera else f"{PREFIX}/{self.device}"
        return f"{root}/events/{kind}"

    def model_state(self, model: str) -> str:
        """Retained: whether the model serves."""
        _check("model", model, _MODEL, "A-Z, a-z, 0-9, '_', '.' and '-', a letter or digit first")
        return f"{PREFIX}/{self.device}/models/{model}/state"

    def states(self) -> tuple[str, ...]:
        """Filters for the retained topics of all models and cameras, those of earlier runs too."""
        root = f"{PREFIX}/{self.device}"
        cameras = f"{root}/cameras/+"
        return f"{root}/models/+/state", f"{cameras}/status", f"{cameras}/calibration"

    def is_state(self, topic: str) -> bool:
        """Whether `topic` is one of `states`, of a name that a model or a camera may have."""
        levels = topic.split("/")
        if levels[:3] != [*PREFIX.split("/"), self.device]:
            return False
        match levels[3:]:
            case ["models", name, "state"]:
                return _MODEL.fullmatch(name) is not None
            case ["cameras", name, "status" | "calibration"]:
                return _NAME.fullmatch(name) is not None
        return False

    def _camera(self, camera: str) -> str:
        _check("camera", camera, _NAME, "a-z, 0-9, '_' and '-'")
        return f"{PREFIX}/{self.device}/cameras/{camera}"


def _check(kind: str, name: str, allowed: re.Pattern[str], remedy: str) -> None:
    if allowed.fullmatch(name) is None:
        raise ValueError(
            f"{kind} name {name!r} cannot be part of an MQTT topic: use 1 to 64 of {remedy}"
        )


CameraState = Literal["ok", "degraded", "stalled", "frozen", "lost"]
DeviceState = Literal["starting", "online", "offline"]

_OF_UPDATE = ("slot", "state", "target", "result", "engine")
_encode = msgspec.json.Encoder().encode


def content_type(payload: PayloadFormat, message: str) -> str:
    """Return the MIME type of a message, of one of ours where it is a protobuf."""
    if payload == "json":
        return "application/json"
    return f"application/x-protobuf; messageType=edge.lanes.v1.{message}"


def lane_frame(
    frame: LaneFrame,
    identity: Identity,
    seq: int,
    now_mono_ns: int,
    payload: PayloadFormat = "json",
) -> bytes:
    """Return the message of `frame`, with its age at `now_mono_ns`; see `lane_frame_fields`.

    Args:
        frame: the pipeline's result.
        identity: of this device.
        seq: count of this message on its topic, dropped ones included.
        now_mono_ns: `time.monotonic_ns()` of the publish.
        payload: its format.
    """
    fields = lane_frame_fields(frame, identity, seq, now_mono_ns)
    if payload == "protobuf":
        return lanes_pb2.LaneFrame(**fields).SerializeToString()
    # As the proto3 JSON mapping has it: a double holds only 53 bits of a 64-bit integer.
    fields["time"] |= {
        "capture_mono_ns": str(frame.capture_mono_ns),
        "capture_epoch_ns": str(frame.capture_epoch_ns),
        "capture_time": rfc3339(frame.capture_epoch_ns),
    }
    return _encode(fields)


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


def meta(
    identity: Identity,
    session: str = "",
    payload: PayloadFormat = "json",
    cameras: Mapping[str, str] = MappingProxyType({}),
    models: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> bytes:
    """Return what a reader needs to know before the first lanes.

    Args:
        identity: of this device.
        session: of this process.
        payload: the format of lanes and events.
        cameras: the id of each camera's calibration; empty where it has none.
        models: the versions of each model that serve.
    """
    return _encode(
        {
            "device": identity.device,
            "version": identity.version,
            "boot_id": identity.boot_id,
            "client_id": identity.client_id,
            "session": session,
            "schemas": [LANES_SCHEMA, EVENT_SCHEMA],
            "payload": payload,
            "cameras": [{"name": name, "calib_id": id_} for name, id_ in sorted(cameras.items())],
            "models": [
                {"name": as_utf8(name), "versions": [str(each) for each in sorted(versions)]}
                for name, versions in sorted(models.items())
            ],
        }
    )


class Birth(msgspec.Struct):
    """Who has published a `meta`; empty where it does not say so."""

    session: str = ""
    client_id: str = ""


def birth_of(payload: bytes) -> Birth:
    """Return who has published `payload`, a `meta`."""
    try:
        return msgspec.json.decode(payload, type=Birth)
    except (ValueError, RecursionError):  # nested too deep
        return Birth()


def calibration(calibration: Calibration) -> bytes:
    """Return how the camera sees and is mounted, as `Calibration` of lane_service.proto."""
    message = calibration_message(calibration)
    return _encode(
        json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


class Mark(msgspec.Struct, frozen=True):
    """What a broker retains: the newest event that it has acknowledged.

    Attributes:
        event: its id. More digits than a device can ever have given are no mark: ids go on above
            it.
        log: the identity of its log; empty where an earlier version of this program gave none.
    """

    event: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,15}$")]
    log: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def id(self) -> int:
        return int(self.event)


def acknowledged(log: str, event_id: int) -> bytes:
    """Return the mark of an event."""
    return _encode(Mark(str(event_id), log))


def mark_of(payload: bytes) -> Mark | None:
    """Return the mark that is in a payload; None of anything else."""
    try:
        return msgspec.json.decode(payload, type=Mark)
    except (ValueError, RecursionError):  # nested too deep
        return None


def read_vehicle_state(data: bytes, now_mono_ns: int, payload: PayloadFormat) -> VehicleState:
    """Return what a message to the topic `vehicle` says: a `SetVehicleStateRequest`.

    Args:
        data: in the form of `payload`; JSON with a misspelt name or word is refused.
        now_mono_ns: `time.monotonic_ns()` of its arrival.
        payload: as the settings have it.

    Raises:
        InvalidRequest: it is no such message, or says what cannot be; see `vehicle_state`.
    """
    request = lane_service_pb2.SetVehicleStateRequest()
    try:
        if payload == "json":
            json_format.Parse(data, request)
        else:
            request.MergeFromString(data)
    except (json_format.ParseError, DecodeError, ValueError, RecursionError) as error:
        text = str(error).partition("\n")[0][:200]
        raise InvalidRequest(
            f"this is no SetVehicleStateRequest in {payload}, as mqtt.payload has it: {text}"
        ) from error
    return vehicle_state(request, now_mono_ns)


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
    *,
    lanes_fail: bool = False,
    reason: str = "",
    text: str = "",
    since_epoch_ns: int = 0,
) -> bytes:
    """Return whether a camera delivers usable frames, and whether its frames get lanes.

    Args:
        state: `degraded` is for frames that arrive with a fault, whatever they are worth.
        last_frame_age_ms: None before its first frame.
        lanes_fail: its frames get no lanes.
        reason: see `LanePipeline.fault`.
        text: the same for people.
        since_epoch_ns: when the camera's state began.
    """
    return _encode(
        {
            "state": state,
            "last_frame_age_ms": last_frame_age_ms,
            "lanes": "failing" if lanes_fail else "ok",
            "reason": reason,
            "text": as_utf8(text),
            "since": rfc3339(since_epoch_ns),
        }
    )


def model_state(name: str, state: str, reason: str) -> bytes:
    """Return whether a model serves, and the reason if it does not."""
    return _encode({"model": as_utf8(name), "state": state, "reason": as_utf8(reason)})


def event(event: Event, identity: Identity, payload: PayloadFormat = "json") -> bytes:
    """Return the message of an event, in the format `payload`."""
    fields = event_fields(event, identity)
    if payload == "protobuf":
        return events_pb2.Event(**fields).SerializeToString()
    for name in ("id", "begin_id", "mono_ns", "epoch_ns"):
        fields[name] = str(fields[name])
    fields["time"] = rfc3339(event.epoch_ns)
    return _encode(fields)


def rfc3339(epoch_ns: int) -> str:
    """Return the time as `2026-01-31T12:00:00.000000Z`."""
    seconds, ns = divmod(epoch_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{ns // 1000:06d}Z"
