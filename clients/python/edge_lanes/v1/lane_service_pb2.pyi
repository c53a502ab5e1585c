from edge_lanes.v1 import events_pb2 as _events_pb2
from edge_lanes.v1 import lanes_pb2 as _lanes_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union
from edge_lanes.v1.lanes_pb2 import LaneFrame as LaneFrame
from edge_lanes.v1.lanes_pb2 import Reason as Reason
from edge_lanes.v1.lanes_pb2 import UsedVehicleState as UsedVehicleState
from edge_lanes.v1.lanes_pb2 import FrameTime as FrameTime
from edge_lanes.v1.lanes_pb2 import CaptureClock as CaptureClock
from edge_lanes.v1.lanes_pb2 import StageLatency as StageLatency
from edge_lanes.v1.lanes_pb2 import ImageSize as ImageSize
from edge_lanes.v1.lanes_pb2 import ModelVersion as ModelVersion
from edge_lanes.v1.lanes_pb2 import Lane as Lane
from edge_lanes.v1.lanes_pb2 import ImagePoints as ImagePoints
from edge_lanes.v1.lanes_pb2 import GroundLane as GroundLane
from edge_lanes.v1.lanes_pb2 import GroundPoints as GroundPoints
from edge_lanes.v1.lanes_pb2 import Polynomial as Polynomial
from edge_lanes.v1.lanes_pb2 import Ego as Ego
from edge_lanes.v1.lanes_pb2 import LineDistance as LineDistance
from edge_lanes.v1.lanes_pb2 import Departure as Departure
from edge_lanes.v1.lanes_pb2 import ReasonCode as ReasonCode
from edge_lanes.v1.lanes_pb2 import Indicator as Indicator
from edge_lanes.v1.lanes_pb2 import FrameStatus as FrameStatus
from edge_lanes.v1.lanes_pb2 import WallClock as WallClock
from edge_lanes.v1.lanes_pb2 import ClockSource as ClockSource
from edge_lanes.v1.lanes_pb2 import MarkingType as MarkingType
from edge_lanes.v1.lanes_pb2 import MarkingColor as MarkingColor
from edge_lanes.v1.lanes_pb2 import DepartureSide as DepartureSide
from edge_lanes.v1.lanes_pb2 import WithheldBy as WithheldBy
from edge_lanes.v1.lanes_pb2 import DepartureState as DepartureState
from edge_lanes.v1.lanes_pb2 import LaneChange as LaneChange

DESCRIPTOR: _descriptor.FileDescriptor
REASON_CODE_UNSPECIFIED: _lanes_pb2.ReasonCode
REASON_CODE_OTHER: _lanes_pb2.ReasonCode
REASON_CODE_AGE: _lanes_pb2.ReasonCode
REASON_CODE_LANE_NOT_FINITE: _lanes_pb2.ReasonCode
REASON_CODE_MODEL_FAILED: _lanes_pb2.ReasonCode
REASON_CODE_TOO_OLD: _lanes_pb2.ReasonCode
REASON_CODE_STARTING: _lanes_pb2.ReasonCode
REASON_CODE_ENDED: _lanes_pb2.ReasonCode
REASON_CODE_STOPPED: _lanes_pb2.ReasonCode
REASON_CODE_NO_FRAMES: _lanes_pb2.ReasonCode
REASON_CODE_STALLED: _lanes_pb2.ReasonCode
REASON_CODE_LOST: _lanes_pb2.ReasonCode
REASON_CODE_STUCK: _lanes_pb2.ReasonCode
REASON_CODE_OUT_OF_SERVICE: _lanes_pb2.ReasonCode
REASON_CODE_UNAVAILABLE: _lanes_pb2.ReasonCode
REASON_CODE_UNAUTHORIZED: _lanes_pb2.ReasonCode
REASON_CODE_NOT_FOUND: _lanes_pb2.ReasonCode
REASON_CODE_NO_DECODER: _lanes_pb2.ReasonCode
REASON_CODE_CORRUPT: _lanes_pb2.ReasonCode
REASON_CODE_CHANGED: _lanes_pb2.ReasonCode
REASON_CODE_LOADING_GSTREAMER: _lanes_pb2.ReasonCode
REASON_CODE_REBOOT_NEEDED: _lanes_pb2.ReasonCode
REASON_CODE_FROZEN: _lanes_pb2.ReasonCode
REASON_CODE_BLACK: _lanes_pb2.ReasonCode
REASON_CODE_WHITE_OUT: _lanes_pb2.ReasonCode
REASON_CODE_COVERED: _lanes_pb2.ReasonCode
REASON_CODE_DARK: _lanes_pb2.ReasonCode
REASON_CODE_BLURRED: _lanes_pb2.ReasonCode
REASON_CODE_DEGRADED: _lanes_pb2.ReasonCode
REASON_CODE_CALIBRATION_SIZE: _lanes_pb2.ReasonCode
REASON_CODE_CALIBRATION_DRIFT: _lanes_pb2.ReasonCode
REASON_CODE_THROTTLED: _lanes_pb2.ReasonCode
REASON_CODE_OVER_CURRENT: _lanes_pb2.ReasonCode
REASON_CODE_UNDERVOLTAGE: _lanes_pb2.ReasonCode
REASON_CODE_CLOCK_UNSYNCHRONIZED: _lanes_pb2.ReasonCode
REASON_CODE_NOT_RECORDED: _lanes_pb2.ReasonCode
REASON_CODE_HTTP_CLOSED: _lanes_pb2.ReasonCode
REASON_CODE_NO_GPU: _lanes_pb2.ReasonCode
REASON_CODE_LEFT: _lanes_pb2.ReasonCode
REASON_CODE_RIGHT: _lanes_pb2.ReasonCode
REASON_CODE_RETURNED: _lanes_pb2.ReasonCode
REASON_CODE_LANE_CHANGED: _lanes_pb2.ReasonCode
REASON_CODE_NOT_SEEN: _lanes_pb2.ReasonCode
REASON_CODE_INDICATOR: _lanes_pb2.ReasonCode
REASON_CODE_SLOW: _lanes_pb2.ReasonCode
REASON_CODE_ROLLED_BACK: _lanes_pb2.ReasonCode
REASON_CODE_SWAPPED: _lanes_pb2.ReasonCode
REASON_CODE_REMOVED: _lanes_pb2.ReasonCode
REASON_CODE_CANDIDATE_GOOD: _lanes_pb2.ReasonCode
REASON_CODE_CANDIDATE_WORSE: _lanes_pb2.ReasonCode
INDICATOR_UNSPECIFIED: _lanes_pb2.Indicator
INDICATOR_OFF: _lanes_pb2.Indicator
INDICATOR_LEFT: _lanes_pb2.Indicator
INDICATOR_RIGHT: _lanes_pb2.Indicator
INDICATOR_HAZARD: _lanes_pb2.Indicator
FRAME_STATUS_UNSPECIFIED: _lanes_pb2.FrameStatus
FRAME_STATUS_OK: _lanes_pb2.FrameStatus
FRAME_STATUS_DEGRADED: _lanes_pb2.FrameStatus
FRAME_STATUS_STALE: _lanes_pb2.FrameStatus
FRAME_STATUS_INVALID: _lanes_pb2.FrameStatus
WALL_CLOCK_UNSPECIFIED: _lanes_pb2.WallClock
WALL_CLOCK_SYNCHRONIZED: _lanes_pb2.WallClock
WALL_CLOCK_UNSYNCHRONIZED: _lanes_pb2.WallClock
WALL_CLOCK_WRONG: _lanes_pb2.WallClock
WALL_CLOCK_UNKNOWN: _lanes_pb2.WallClock
CLOCK_SOURCE_UNSPECIFIED: _lanes_pb2.ClockSource
CLOCK_SOURCE_ARRIVAL: _lanes_pb2.ClockSource
CLOCK_SOURCE_SENSOR: _lanes_pb2.ClockSource
CLOCK_SOURCE_RTP: _lanes_pb2.ClockSource
CLOCK_SOURCE_NTP: _lanes_pb2.ClockSource
CLOCK_SOURCE_RECORDING: _lanes_pb2.ClockSource
MARKING_TYPE_UNSPECIFIED: _lanes_pb2.MarkingType
MARKING_TYPE_UNKNOWN: _lanes_pb2.MarkingType
MARKING_TYPE_SOLID: _lanes_pb2.MarkingType
MARKING_TYPE_DASHED: _lanes_pb2.MarkingType
MARKING_COLOR_UNSPECIFIED: _lanes_pb2.MarkingColor
MARKING_COLOR_UNKNOWN: _lanes_pb2.MarkingColor
MARKING_COLOR_WHITE: _lanes_pb2.MarkingColor
MARKING_COLOR_YELLOW: _lanes_pb2.MarkingColor
DEPARTURE_SIDE_UNSPECIFIED: _lanes_pb2.DepartureSide
DEPARTURE_SIDE_NONE: _lanes_pb2.DepartureSide
DEPARTURE_SIDE_LEFT: _lanes_pb2.DepartureSide
DEPARTURE_SIDE_RIGHT: _lanes_pb2.DepartureSide
WITHHELD_BY_UNSPECIFIED: _lanes_pb2.WithheldBy
WITHHELD_BY_NONE: _lanes_pb2.WithheldBy
WITHHELD_BY_INDICATOR: _lanes_pb2.WithheldBy
WITHHELD_BY_SLOW: _lanes_pb2.WithheldBy
DEPARTURE_STATE_UNSPECIFIED: _lanes_pb2.DepartureState
DEPARTURE_STATE_NONE: _lanes_pb2.DepartureState
DEPARTURE_STATE_WARNING: _lanes_pb2.DepartureState
DEPARTURE_STATE_WITHHELD: _lanes_pb2.DepartureState
LANE_CHANGE_UNSPECIFIED: _lanes_pb2.LaneChange
LANE_CHANGE_NONE: _lanes_pb2.LaneChange
LANE_CHANGE_LEFT: _lanes_pb2.LaneChange
LANE_CHANGE_RIGHT: _lanes_pb2.LaneChange

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
    indicator: _lanes_pb2.Indicator
    mono_ns: int
    def __init__(self, speed_mps: _Optional[float] = ..., yaw_rate_radps: _Optional[float] = ..., indicator: _Optional[_Union[_lanes_pb2.Indicator, str]] = ..., mono_ns: _Optional[int] = ...) -> None: ...

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
