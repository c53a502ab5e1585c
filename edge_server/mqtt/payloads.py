"""Encodes the daemon's states and events as the bytes of MQTT messages: pure functions."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from edge_server.board.facts import BoardFacts
from edge_server.errors import InvalidRequest
from edge_server.pipeline.messages import (
    EVENT_SCHEMA,
    LANES_SCHEMA,
    PERCEPTION_SCHEMA,
    calibration_message,
    event_message,
    reason_fields,
    rfc3339,
)
from edge_server.pipeline.vehicle import vehicle_state
from edge_server.process.text import as_utf8
from edge_server.proto.edge.lanes.v1 import health_pb2, lane_service_pb2

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from google.protobuf.message import Message

    from edge_server.board.board import Identity
    from edge_server.board.update import UpdateRecord
    from edge_server.board.watch import DeviceReport
    from edge_server.cameras.calibration import Calibration
    from edge_server.lanes.agreement import LaneVerdict
    from edge_server.lanes.types import VehicleState
    from edge_server.pipeline.event_log import Event
    from edge_server.settings.sections import PayloadFormat

Kind = TypeVar("Kind", bound=msgspec.Struct)

PREFIX = "edge/v1"

_NAME = re.compile(r"[a-z0-9_-]{1,64}", re.ASCII)
# Model names are the repository's, and Triton's allow capitals: `laneDetect_model`.
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


class Topics:
    """The topics of one device; every name in them is safe as one level of a topic.

    Attributes:
        status: retained: online or offline; the broker publishes offline as the last will.
        meta: retained, the birth message: versions, schemas, cameras and models.
        health: retained: temperatures, power, clocks and drives of the board.
        update: retained: version, slot, and what became of the last update.
        plans: retained: how far the builds of TensorRT plans are, by `edge-server plan refresh`.
        acknowledged: retained: the id of the newest event that the broker has acknowledged.
        vehicle: never retained, for others to publish: what the vehicle measures of itself.

    Raises:
        ValueError: an unsafe name; the text names it and the remedy. The methods raise it too.
    """

    def __init__(self, device: str) -> None:
        _check("device", device)
        self._root = root = f"{PREFIX}/{device}"
        self.status = f"{root}/status"
        self.meta = f"{root}/meta"
        self.health = f"{root}/health"
        self.update = f"{root}/update"
        self.plans = f"{root}/plans"
        self.acknowledged = f"{root}/acknowledged"
        self.vehicle = f"{root}/vehicle"

    def lanes(self, camera: str) -> str:
        """Live, never retained: the lanes of every frame."""
        return f"{self._camera(camera)}/lanes"

    def network(self, camera: str, network: str) -> str:
        """Live, never retained: what a network beside the lanes finds."""
        _check("network", network)
        return f"{self._camera(camera)}/networks/{network}"

    def verdict(self, camera: str, network: str) -> str:
        """Retained: how a candidate's lanes agree with those served."""
        return f"{self.network(camera, network)}/verdict"

    def camera_status(self, camera: str) -> str:
        """Retained: whether the camera delivers."""
        return f"{self._camera(camera)}/status"

    def calibration(self, camera: str) -> str:
        """Retained: how the camera sees and is mounted; empty where it has no calibration."""
        return f"{self._camera(camera)}/calibration"

    def event(self, kind: str, camera: str = "") -> str:
        """Never retained, at least once: what begins and ends; of a camera, or of the device."""
        root = self._camera(camera) if camera else self._root
        return f"{root}/events/{kind}"

    def model_state(self, model: str) -> str:
        """Retained: whether the model serves."""
        allowed = "A-Z, a-z, 0-9, '_', '.' and '-', a letter or digit first"
        _check("model", model, _MODEL, allowed)
        return f"{self._root}/models/{model}/state"

    def channel(self, channel: str) -> str:
        """Retained: what a channel says, and what became of its model here."""
        _check("channel", channel)
        return f"{self._root}/channels/{channel}"

    def states(self) -> tuple[str, ...]:
        """Filters for the retained topics of all models, cameras and channels, those of earlier
        runs too."""
        root, cameras = self._root, f"{self._root}/cameras/+"
        of_models = f"{root}/models/+/state", f"{cameras}/networks/+/verdict", f"{root}/channels/+"
        return *of_models, f"{cameras}/status", f"{cameras}/calibration"

    def is_state(self, topic: str) -> bool:
        """Whether `topic` is one of `states`, of a name that its subject may have."""
        root, _, levels = topic.partition(f"{self._root}/")
        if root:
            return False
        match levels.split("/"):
            case ["models", name, "state"]:
                return _MODEL.fullmatch(name) is not None
            case ["cameras", name, "status" | "calibration"] | ["channels", name]:
                return _NAME.fullmatch(name) is not None
            case ["cameras", name, "networks", network, "verdict"]:
                return all(map(_NAME.fullmatch, (name, network)))
        return False

    def _camera(self, camera: str) -> str:
        _check("camera", camera)
        return f"{self._root}/cameras/{camera}"


def _check(
    kind: str, name: str, form: re.Pattern[str] = _NAME, allowed: str = "a-z, 0-9, '_' and '-'"
) -> None:
    if form.fullmatch(name) is None:
        raise ValueError(
            f"{kind} name {name!r} cannot be part of an MQTT topic: use 1 to 64 of {allowed}"
        )


CameraState = Literal["ok", "degraded", "stalled", "frozen", "lost"]
DeviceState = Literal["starting", "online", "offline"]

_OF_UPDATE = ("slot", "state", "target", "result", "engine")
_encode = msgspec.json.Encoder().encode


def content_type(payload: PayloadFormat, message: str) -> str:
    """Return the MIME type of a message, of one of ours where it is a protobuf."""
    if payload == "json":
        return "application/json"
    package = "perception" if message == "NetworkFrame" else "lanes"
    return f"application/x-protobuf; messageType=edge.{package}.v1.{message}"


def status(identity: Identity, state: DeviceState, **more: Any) -> bytes:
    """Return the `status` payload; that of `offline` is also the last will, so it has no time.

    Args:
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
        cameras: the id of each camera's calibration; empty where it has none.
    """
    return _encode(
        {
            "device": identity.device,
            "version": identity.version,
            "boot_id": identity.boot_id,
            "client_id": identity.client_id,
            "session": session,
            "schemas": [LANES_SCHEMA, PERCEPTION_SCHEMA, EVENT_SCHEMA],
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


def calibration(calibration: Calibration) -> bytes:
    """Return how the camera sees and is mounted, as `Calibration` of lane_service.proto."""
    return _encode(_fields_of(calibration_message(calibration)))


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


def decoded(payload: bytes, kind: type[Kind]) -> Kind | None:
    """Return what a payload says, a Birth or a Mark; None of anything else."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (ValueError, RecursionError):  # nested too deep
        return None


def read_vehicle_state(data: bytes, now_mono_ns: int, payload: PayloadFormat) -> VehicleState:
    """Return what a message to the topic `vehicle` says: a `SetVehicleStateRequest`.

    Args:
        data: in the form of `payload`; JSON with a misspelt name or word is refused.

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
    lanes_fail: bool | None = False,
    reason: str = "",
    text: str = "",
    since_epoch_ns: int = 0,
    networks: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return whether a camera delivers usable frames, and whether its frames get lanes.

    Args:
        state: `degraded` is for frames that arrive with a fault, whatever they are worth.
        last_frame_age_ms: None before its first frame.
        lanes_fail: its frames get no lanes; None where it has no lane model.
        networks: why frames have no results of each other network; empty where they have.
    """
    of_networks = {
        name: {"state": "failing" if text else "ok", "text": as_utf8(text)}
        for name, text in networks.items()
    }
    return _encode(
        {
            "state": state,
            "last_frame_age_ms": last_frame_age_ms,
            **({} if lanes_fail is None else {"lanes": "failing" if lanes_fail else "ok"}),
            "reason": reason,
            "text": as_utf8(text),
            "since": rfc3339(since_epoch_ns),
            **({"networks": of_networks} if of_networks else {}),
        }
    )


def verdict(network: str, model: str, served: str, found: LaneVerdict) -> bytes:
    """Return how the lanes of a candidate agree with those of the served model."""
    return _encode(
        {
            "network": network,
            "model": as_utf8(model),
            "served": as_utf8(served),
            "outcome": found.outcome,
            "text": as_utf8(found.text),
            "frames": found.frames,
            "measures": [
                {
                    "name": each.name,
                    "value": round(each.value, 4),
                    "low": round(each.low, 4),
                    "high": round(each.high, 4),
                    "limit": each.limit,
                }
                for each in found.measures
            ],
            "lateral_m": {f"{at:g}": round(mean, 3) for at, mean in found.lateral_m},
        }
    )


def model_state(name: str, state: str, reason: str, configuration: str = "") -> bytes:
    """Return whether a model serves, by which configuration, and the reason if it does not."""
    fields = {"model": as_utf8(name), "state": state, "reason": as_utf8(reason)}
    if configuration:
        fields["configuration"] = as_utf8(configuration)
    return _encode(fields)


def event(event: Event, identity: Identity, payload: PayloadFormat = "json") -> bytes:
    """Return the message of an event, in the format `payload`."""
    message = event_message(event, identity)
    if payload == "protobuf":
        return message.SerializeToString()
    return _encode(_fields_of(message) | {"time": rfc3339(event.epoch_ns)})


HEALTH_SCHEMA = "edge.health/1"
_UINT32 = 2**32
_MIB = 1 << 20


def health(
    identity: Identity,
    report: DeviceReport,
    free_bytes: Mapping[str, int],
    *,
    mono_ns: int,
    epoch_ns: int,
) -> bytes:
    """Return the device's health; what is not known is absent."""
    facts = report.facts
    status = "UNKNOWN" if facts is None else "OK"
    if report.reasons:
        status = "DEGRADED"
    facts = BoardFacts() if facts is None else facts
    memory = facts.memory
    swap_used = None
    if memory.swap_total_bytes is not None and memory.swap_free_bytes is not None:
        swap_used = memory.swap_total_bytes - memory.swap_free_bytes
    message = health_pb2.DeviceHealth(
        schema=HEALTH_SCHEMA,
        device=identity.device,
        boot_id=identity.boot_id,
        status=f"HEALTH_STATUS_{status}",
        **reason_fields(report.reasons),
        time={
            "mono_ns": mono_ns,
            "clock": f"HEALTH_CLOCK_{report.clock.name}",
            "clock_steps": report.clock_steps % _UINT32,
            "uptime_s": None if facts.uptime_s is None else int(facts.uptime_s) % _UINT32,
        },
        power_mode=facts.power_mode and as_utf8(facts.power_mode),
        boot_reason=facts.boot_reason and as_utf8(facts.boot_reason),
        engines=[
            {
                "name": engine.name,
                "load": engine.load,
                "clock_mhz": _whole(engine.now_hz, 1_000_000),
                "highest_clock_mhz": _whole(engine.highest_hz, 1_000_000),
            }
            for engine in facts.engines
        ],
        temperatures=[
            {
                "zone": as_utf8(zone.name),
                "celsius": zone.celsius,
                "throttle_celsius": zone.throttle_celsius,
            }
            for zone in facts.heat.zones
        ],
        rails=[{"name": as_utf8(rail.name), "watts": round(rail.watts, 3)} for rail in facts.rails],
        memory={
            "total_mib": _whole(memory.total_bytes, _MIB),
            "available_mib": _whole(memory.available_bytes, _MIB),
            "swap_used_mib": _whole(swap_used, _MIB),
        },
        storage=[
            {"name": as_utf8(drive.name), "worn": drive.worn, "celsius": drive.celsius}
            for drive in facts.storage
        ],
        supply_events=[
            {"name": as_utf8(event.name), "count": event.count % _UINT32}
            for event in facts.heat.supply_events
        ],
        disks=[
            {"directory": as_utf8(directory), "free_mib": _whole(count, _MIB)}
            for directory, count in free_bytes.items()
        ],
    )
    fields = _fields_of(message)
    fields["time"]["time"] = rfc3339(epoch_ns)
    return _encode(fields)


def _whole(count: int | None, unit: int) -> int | None:
    return None if count is None else max(0, count) // unit % _UINT32


def _fields_of(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


_STATES = ("ok", "degraded", "stalled", "frozen", "lost")
# "None" is its word for "not known"; the key is absent where the offset cannot be measured.
_OFFSET = "{{ (value_json.get('ego') or {}).get('lateral_offset_m') }}"
_DEPARTURE = "{{ 'OFF' if value_json.phase == 'EVENT_PHASE_END' else 'ON' }}"


def discovery_topic(prefix: str, identity: Identity) -> str:
    """Return the topic of the device's discovery; retained."""
    return f"{prefix}/device/edge_server_{identity.device}/config"


def discovery(
    identity: Identity,
    topics: Topics,
    cameras: Iterable[str],
    without_lanes: Collection[str] = (),
) -> bytes:
    """Return the entities of every camera: its state; departure warning and lateral offset, but of
    those `without_lanes`."""
    components: dict[str, Any] = {}
    for camera in sorted(cameras):
        unique = f"edge_server_{identity.device}_{camera}"
        components[f"{camera}_state"] = {
            "p": "sensor",
            "unique_id": f"{unique}_state",
            "name": f"{camera} camera",
            "device_class": "enum",
            "options": _STATES,
            "entity_category": "diagnostic",
            "state_topic": topics.camera_status(camera),
            "value_template": "{{ value_json.state }}",
        }
        if camera in without_lanes:
            continue
        components[f"{camera}_lane_departure"] = {
            "p": "binary_sensor",
            "unique_id": f"{unique}_lane_departure",
            "name": f"{camera} lane departure",
            "device_class": "safety",
            "state_topic": topics.event("lane_departure", camera),
            "value_template": _DEPARTURE,
        }
        components[f"{camera}_lateral_offset"] = {
            "p": "sensor",
            "unique_id": f"{unique}_lateral_offset",
            "name": f"{camera} lateral offset",
            "device_class": "distance",
            "state_class": "measurement",
            "unit_of_measurement": "m",
            "state_topic": topics.lanes(camera),
            "value_template": _OFFSET,
            "expire_after": 2,
        }
    return _encode(
        {
            "dev": {
                "ids": [f"edge_server_{identity.device}"],
                "name": identity.device,
                "sw": identity.version,
            },
            "o": {"name": "edge_server", "sw": identity.version},
            "availability_topic": topics.status,
            "availability_template": "{{ value_json.state }}",
            "cmps": components,
            "qos": 1,
        }
    )
