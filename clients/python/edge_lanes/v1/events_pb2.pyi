import datetime

from edge_lanes.v1 import lanes_pb2 as _lanes_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_LANE_DEPARTURE: _ClassVar[EventKind]
    EVENT_KIND_LANE_CHANGE: _ClassVar[EventKind]
    EVENT_KIND_CAMERA: _ClassVar[EventKind]
    EVENT_KIND_MODEL: _ClassVar[EventKind]
    EVENT_KIND_DEGRADED: _ClassVar[EventKind]

class EventPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_PHASE_UNSPECIFIED: _ClassVar[EventPhase]
    EVENT_PHASE_BEGIN: _ClassVar[EventPhase]
    EVENT_PHASE_END: _ClassVar[EventPhase]
    EVENT_PHASE_INSTANT: _ClassVar[EventPhase]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_LANE_DEPARTURE: EventKind
EVENT_KIND_LANE_CHANGE: EventKind
EVENT_KIND_CAMERA: EventKind
EVENT_KIND_MODEL: EventKind
EVENT_KIND_DEGRADED: EventKind
EVENT_PHASE_UNSPECIFIED: EventPhase
EVENT_PHASE_BEGIN: EventPhase
EVENT_PHASE_END: EventPhase
EVENT_PHASE_INSTANT: EventPhase

class Event(_message.Message):
    __slots__ = ("schema", "device", "boot_id", "id", "kind", "phase", "begin_id", "camera", "frame_id", "model", "model_version", "cause", "text", "mono_ns", "epoch_ns", "time", "distance_to_line_m", "time_to_line_s", "log", "cause_code")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_ID_FIELD_NUMBER: _ClassVar[int]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    FRAME_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MONO_NS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_NS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_TO_LINE_M_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LINE_S_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    CAUSE_CODE_FIELD_NUMBER: _ClassVar[int]
    schema: str
    device: str
    boot_id: str
    id: int
    kind: EventKind
    phase: EventPhase
    begin_id: int
    camera: str
    frame_id: int
    model: str
    model_version: str
    cause: str
    text: str
    mono_ns: int
    epoch_ns: int
    time: _timestamp_pb2.Timestamp
    distance_to_line_m: float
    time_to_line_s: float
    log: str
    cause_code: _lanes_pb2.ReasonCode
    def __init__(self, schema: _Optional[str] = ..., device: _Optional[str] = ..., boot_id: _Optional[str] = ..., id: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., phase: _Optional[_Union[EventPhase, str]] = ..., begin_id: _Optional[int] = ..., camera: _Optional[str] = ..., frame_id: _Optional[int] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., cause: _Optional[str] = ..., text: _Optional[str] = ..., mono_ns: _Optional[int] = ..., epoch_ns: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., distance_to_line_m: _Optional[float] = ..., time_to_line_s: _Optional[float] = ..., log: _Optional[str] = ..., cause_code: _Optional[_Union[_lanes_pb2.ReasonCode, str]] = ...) -> None: ...
