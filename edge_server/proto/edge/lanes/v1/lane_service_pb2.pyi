from edge_server.proto.edge.lanes.v1 import events_pb2 as _events_pb2
from edge_server.proto.edge.lanes.v1 import lanes_pb2 as _lanes_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Indicator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDICATOR_UNSPECIFIED: _ClassVar[Indicator]
    INDICATOR_OFF: _ClassVar[Indicator]
    INDICATOR_LEFT: _ClassVar[Indicator]
    INDICATOR_RIGHT: _ClassVar[Indicator]
    INDICATOR_HAZARD: _ClassVar[Indicator]
INDICATOR_UNSPECIFIED: Indicator
INDICATOR_OFF: Indicator
INDICATOR_LEFT: Indicator
INDICATOR_RIGHT: Indicator
INDICATOR_HAZARD: Indicator

class StreamLanesRequest(_message.Message):
    __slots__ = ("cameras", "max_hz", "window", "acknowledged")
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    MAX_HZ_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedScalarFieldContainer[str]
    max_hz: float
    window: int
    acknowledged: int
    def __init__(self, cameras: _Optional[_Iterable[str]] = ..., max_hz: _Optional[float] = ..., window: _Optional[int] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class StreamLanesResponse(_message.Message):
    __slots__ = ("sequence", "frame", "lost")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    frame: _lanes_pb2.LaneFrame
    lost: int
    def __init__(self, sequence: _Optional[int] = ..., frame: _Optional[_Union[_lanes_pb2.LaneFrame, _Mapping]] = ..., lost: _Optional[int] = ...) -> None: ...

class GetLatestLanesRequest(_message.Message):
    __slots__ = ("camera",)
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    camera: str
    def __init__(self, camera: _Optional[str] = ...) -> None: ...

class GetLatestLanesResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: _lanes_pb2.LaneFrame
    def __init__(self, frame: _Optional[_Union[_lanes_pb2.LaneFrame, _Mapping]] = ...) -> None: ...

class StreamEventsRequest(_message.Message):
    __slots__ = ("after_id", "log")
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    after_id: int
    log: str
    def __init__(self, after_id: _Optional[int] = ..., log: _Optional[str] = ...) -> None: ...

class StreamEventsResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _events_pb2.Event
    def __init__(self, event: _Optional[_Union[_events_pb2.Event, _Mapping]] = ...) -> None: ...

class ListCamerasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCamerasResponse(_message.Message):
    __slots__ = ("cameras",)
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedCompositeFieldContainer[Camera]
    def __init__(self, cameras: _Optional[_Iterable[_Union[Camera, _Mapping]]] = ...) -> None: ...

class Camera(_message.Message):
    __slots__ = ("name", "state", "reason", "text", "model", "calibration")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    reason: str
    text: str
    model: str
    calibration: Calibration
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., text: _Optional[str] = ..., model: _Optional[str] = ..., calibration: _Optional[_Union[Calibration, _Mapping]] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("id", "lens", "width", "height", "fx", "fy", "cx", "cy", "distortion", "height_m", "pitch_rad", "yaw_rad", "roll_rad", "x_m", "y_m")
    ID_FIELD_NUMBER: _ClassVar[int]
    LENS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FX_FIELD_NUMBER: _ClassVar[int]
    FY_FIELD_NUMBER: _ClassVar[int]
    CX_FIELD_NUMBER: _ClassVar[int]
    CY_FIELD_NUMBER: _ClassVar[int]
    DISTORTION_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_M_FIELD_NUMBER: _ClassVar[int]
    PITCH_RAD_FIELD_NUMBER: _ClassVar[int]
    YAW_RAD_FIELD_NUMBER: _ClassVar[int]
    ROLL_RAD_FIELD_NUMBER: _ClassVar[int]
    X_M_FIELD_NUMBER: _ClassVar[int]
    Y_M_FIELD_NUMBER: _ClassVar[int]
    id: str
    lens: str
    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    distortion: _containers.RepeatedScalarFieldContainer[float]
    height_m: float
    pitch_rad: float
    yaw_rad: float
    roll_rad: float
    x_m: float
    y_m: float
    def __init__(self, id: _Optional[str] = ..., lens: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., fx: _Optional[float] = ..., fy: _Optional[float] = ..., cx: _Optional[float] = ..., cy: _Optional[float] = ..., distortion: _Optional[_Iterable[float]] = ..., height_m: _Optional[float] = ..., pitch_rad: _Optional[float] = ..., yaw_rad: _Optional[float] = ..., roll_rad: _Optional[float] = ..., x_m: _Optional[float] = ..., y_m: _Optional[float] = ...) -> None: ...

class SetVehicleStateRequest(_message.Message):
    __slots__ = ("speed_mps", "yaw_rate_radps", "indicator", "mono_ns")
    SPEED_MPS_FIELD_NUMBER: _ClassVar[int]
    YAW_RATE_RADPS_FIELD_NUMBER: _ClassVar[int]
    INDICATOR_FIELD_NUMBER: _ClassVar[int]
    MONO_NS_FIELD_NUMBER: _ClassVar[int]
    speed_mps: float
    yaw_rate_radps: float
    indicator: Indicator
    mono_ns: int
    def __init__(self, speed_mps: _Optional[float] = ..., yaw_rate_radps: _Optional[float] = ..., indicator: _Optional[_Union[Indicator, str]] = ..., mono_ns: _Optional[int] = ...) -> None: ...

class SetVehicleStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("cause", "before_s", "after_s")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    cause: str
    before_s: float
    after_s: float
    def __init__(self, cause: _Optional[str] = ..., before_s: _Optional[float] = ..., after_s: _Optional[float] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: str
    def __init__(self, file: _Optional[str] = ...) -> None: ...
