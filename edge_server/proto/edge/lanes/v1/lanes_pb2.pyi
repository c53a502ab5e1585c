import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReasonCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_CODE_UNSPECIFIED: _ClassVar[ReasonCode]
    REASON_CODE_OTHER: _ClassVar[ReasonCode]
    REASON_CODE_AGE: _ClassVar[ReasonCode]
    REASON_CODE_LANE_NOT_FINITE: _ClassVar[ReasonCode]
    REASON_CODE_MODEL_FAILED: _ClassVar[ReasonCode]
    REASON_CODE_TOO_OLD: _ClassVar[ReasonCode]
    REASON_CODE_STARTING: _ClassVar[ReasonCode]
    REASON_CODE_ENDED: _ClassVar[ReasonCode]
    REASON_CODE_STOPPED: _ClassVar[ReasonCode]
    REASON_CODE_NO_FRAMES: _ClassVar[ReasonCode]
    REASON_CODE_STALLED: _ClassVar[ReasonCode]
    REASON_CODE_LOST: _ClassVar[ReasonCode]
    REASON_CODE_STUCK: _ClassVar[ReasonCode]
    REASON_CODE_OUT_OF_SERVICE: _ClassVar[ReasonCode]
    REASON_CODE_UNAVAILABLE: _ClassVar[ReasonCode]
    REASON_CODE_UNAUTHORIZED: _ClassVar[ReasonCode]
    REASON_CODE_NOT_FOUND: _ClassVar[ReasonCode]
    REASON_CODE_NO_DECODER: _ClassVar[ReasonCode]
    REASON_CODE_CORRUPT: _ClassVar[ReasonCode]
    REASON_CODE_CHANGED: _ClassVar[ReasonCode]
    REASON_CODE_LOADING_GSTREAMER: _ClassVar[ReasonCode]
    REASON_CODE_REBOOT_NEEDED: _ClassVar[ReasonCode]
    REASON_CODE_FROZEN: _ClassVar[ReasonCode]
    REASON_CODE_BLACK: _ClassVar[ReasonCode]
    REASON_CODE_WHITE_OUT: _ClassVar[ReasonCode]
    REASON_CODE_COVERED: _ClassVar[ReasonCode]
    REASON_CODE_DARK: _ClassVar[ReasonCode]
    REASON_CODE_BLURRED: _ClassVar[ReasonCode]
    REASON_CODE_DEGRADED: _ClassVar[ReasonCode]
    REASON_CODE_CALIBRATION_SIZE: _ClassVar[ReasonCode]
    REASON_CODE_CALIBRATION_DRIFT: _ClassVar[ReasonCode]
    REASON_CODE_THROTTLED: _ClassVar[ReasonCode]
    REASON_CODE_OVER_CURRENT: _ClassVar[ReasonCode]
    REASON_CODE_UNDERVOLTAGE: _ClassVar[ReasonCode]
    REASON_CODE_CLOCK_UNSYNCHRONIZED: _ClassVar[ReasonCode]
    REASON_CODE_NOT_RECORDED: _ClassVar[ReasonCode]
    REASON_CODE_HTTP_CLOSED: _ClassVar[ReasonCode]
    REASON_CODE_NO_GPU: _ClassVar[ReasonCode]
    REASON_CODE_LEFT: _ClassVar[ReasonCode]
    REASON_CODE_RIGHT: _ClassVar[ReasonCode]
    REASON_CODE_RETURNED: _ClassVar[ReasonCode]
    REASON_CODE_LANE_CHANGED: _ClassVar[ReasonCode]
    REASON_CODE_NOT_SEEN: _ClassVar[ReasonCode]
    REASON_CODE_INDICATOR: _ClassVar[ReasonCode]
    REASON_CODE_SLOW: _ClassVar[ReasonCode]
    REASON_CODE_ROLLED_BACK: _ClassVar[ReasonCode]
    REASON_CODE_SWAPPED: _ClassVar[ReasonCode]
    REASON_CODE_REMOVED: _ClassVar[ReasonCode]
    REASON_CODE_CANDIDATE_GOOD: _ClassVar[ReasonCode]
    REASON_CODE_CANDIDATE_WORSE: _ClassVar[ReasonCode]

class Indicator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDICATOR_UNSPECIFIED: _ClassVar[Indicator]
    INDICATOR_OFF: _ClassVar[Indicator]
    INDICATOR_LEFT: _ClassVar[Indicator]
    INDICATOR_RIGHT: _ClassVar[Indicator]
    INDICATOR_HAZARD: _ClassVar[Indicator]

class FrameStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_STATUS_UNSPECIFIED: _ClassVar[FrameStatus]
    FRAME_STATUS_OK: _ClassVar[FrameStatus]
    FRAME_STATUS_DEGRADED: _ClassVar[FrameStatus]
    FRAME_STATUS_STALE: _ClassVar[FrameStatus]
    FRAME_STATUS_INVALID: _ClassVar[FrameStatus]

class WallClock(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WALL_CLOCK_UNSPECIFIED: _ClassVar[WallClock]
    WALL_CLOCK_SYNCHRONIZED: _ClassVar[WallClock]
    WALL_CLOCK_UNSYNCHRONIZED: _ClassVar[WallClock]
    WALL_CLOCK_WRONG: _ClassVar[WallClock]
    WALL_CLOCK_UNKNOWN: _ClassVar[WallClock]

class ClockSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOCK_SOURCE_UNSPECIFIED: _ClassVar[ClockSource]
    CLOCK_SOURCE_ARRIVAL: _ClassVar[ClockSource]
    CLOCK_SOURCE_SENSOR: _ClassVar[ClockSource]
    CLOCK_SOURCE_RTP: _ClassVar[ClockSource]
    CLOCK_SOURCE_NTP: _ClassVar[ClockSource]
    CLOCK_SOURCE_RECORDING: _ClassVar[ClockSource]

class MarkingType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MARKING_TYPE_UNSPECIFIED: _ClassVar[MarkingType]
    MARKING_TYPE_UNKNOWN: _ClassVar[MarkingType]
    MARKING_TYPE_SOLID: _ClassVar[MarkingType]
    MARKING_TYPE_DASHED: _ClassVar[MarkingType]

class MarkingColor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MARKING_COLOR_UNSPECIFIED: _ClassVar[MarkingColor]
    MARKING_COLOR_UNKNOWN: _ClassVar[MarkingColor]
    MARKING_COLOR_WHITE: _ClassVar[MarkingColor]
    MARKING_COLOR_YELLOW: _ClassVar[MarkingColor]

class DepartureSide(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPARTURE_SIDE_UNSPECIFIED: _ClassVar[DepartureSide]
    DEPARTURE_SIDE_NONE: _ClassVar[DepartureSide]
    DEPARTURE_SIDE_LEFT: _ClassVar[DepartureSide]
    DEPARTURE_SIDE_RIGHT: _ClassVar[DepartureSide]

class WithheldBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WITHHELD_BY_UNSPECIFIED: _ClassVar[WithheldBy]
    WITHHELD_BY_NONE: _ClassVar[WithheldBy]
    WITHHELD_BY_INDICATOR: _ClassVar[WithheldBy]
    WITHHELD_BY_SLOW: _ClassVar[WithheldBy]

class DepartureState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPARTURE_STATE_UNSPECIFIED: _ClassVar[DepartureState]
    DEPARTURE_STATE_NONE: _ClassVar[DepartureState]
    DEPARTURE_STATE_WARNING: _ClassVar[DepartureState]
    DEPARTURE_STATE_WITHHELD: _ClassVar[DepartureState]

class LaneChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_CHANGE_UNSPECIFIED: _ClassVar[LaneChange]
    LANE_CHANGE_NONE: _ClassVar[LaneChange]
    LANE_CHANGE_LEFT: _ClassVar[LaneChange]
    LANE_CHANGE_RIGHT: _ClassVar[LaneChange]
REASON_CODE_UNSPECIFIED: ReasonCode
REASON_CODE_OTHER: ReasonCode
REASON_CODE_AGE: ReasonCode
REASON_CODE_LANE_NOT_FINITE: ReasonCode
REASON_CODE_MODEL_FAILED: ReasonCode
REASON_CODE_TOO_OLD: ReasonCode
REASON_CODE_STARTING: ReasonCode
REASON_CODE_ENDED: ReasonCode
REASON_CODE_STOPPED: ReasonCode
REASON_CODE_NO_FRAMES: ReasonCode
REASON_CODE_STALLED: ReasonCode
REASON_CODE_LOST: ReasonCode
REASON_CODE_STUCK: ReasonCode
REASON_CODE_OUT_OF_SERVICE: ReasonCode
REASON_CODE_UNAVAILABLE: ReasonCode
REASON_CODE_UNAUTHORIZED: ReasonCode
REASON_CODE_NOT_FOUND: ReasonCode
REASON_CODE_NO_DECODER: ReasonCode
REASON_CODE_CORRUPT: ReasonCode
REASON_CODE_CHANGED: ReasonCode
REASON_CODE_LOADING_GSTREAMER: ReasonCode
REASON_CODE_REBOOT_NEEDED: ReasonCode
REASON_CODE_FROZEN: ReasonCode
REASON_CODE_BLACK: ReasonCode
REASON_CODE_WHITE_OUT: ReasonCode
REASON_CODE_COVERED: ReasonCode
REASON_CODE_DARK: ReasonCode
REASON_CODE_BLURRED: ReasonCode
REASON_CODE_DEGRADED: ReasonCode
REASON_CODE_CALIBRATION_SIZE: ReasonCode
REASON_CODE_CALIBRATION_DRIFT: ReasonCode
REASON_CODE_THROTTLED: ReasonCode
REASON_CODE_OVER_CURRENT: ReasonCode
REASON_CODE_UNDERVOLTAGE: ReasonCode
REASON_CODE_CLOCK_UNSYNCHRONIZED: ReasonCode
REASON_CODE_NOT_RECORDED: ReasonCode
REASON_CODE_HTTP_CLOSED: ReasonCode
REASON_CODE_NO_GPU: ReasonCode
REASON_CODE_LEFT: ReasonCode
REASON_CODE_RIGHT: ReasonCode
REASON_CODE_RETURNED: ReasonCode
REASON_CODE_LANE_CHANGED: ReasonCode
REASON_CODE_NOT_SEEN: ReasonCode
REASON_CODE_INDICATOR: ReasonCode
REASON_CODE_SLOW: ReasonCode
REASON_CODE_ROLLED_BACK: ReasonCode
REASON_CODE_SWAPPED: ReasonCode
REASON_CODE_REMOVED: ReasonCode
REASON_CODE_CANDIDATE_GOOD: ReasonCode
REASON_CODE_CANDIDATE_WORSE: ReasonCode
INDICATOR_UNSPECIFIED: Indicator
INDICATOR_OFF: Indicator
INDICATOR_LEFT: Indicator
INDICATOR_RIGHT: Indicator
INDICATOR_HAZARD: Indicator
FRAME_STATUS_UNSPECIFIED: FrameStatus
FRAME_STATUS_OK: FrameStatus
FRAME_STATUS_DEGRADED: FrameStatus
FRAME_STATUS_STALE: FrameStatus
FRAME_STATUS_INVALID: FrameStatus
WALL_CLOCK_UNSPECIFIED: WallClock
WALL_CLOCK_SYNCHRONIZED: WallClock
WALL_CLOCK_UNSYNCHRONIZED: WallClock
WALL_CLOCK_WRONG: WallClock
WALL_CLOCK_UNKNOWN: WallClock
CLOCK_SOURCE_UNSPECIFIED: ClockSource
CLOCK_SOURCE_ARRIVAL: ClockSource
CLOCK_SOURCE_SENSOR: ClockSource
CLOCK_SOURCE_RTP: ClockSource
CLOCK_SOURCE_NTP: ClockSource
CLOCK_SOURCE_RECORDING: ClockSource
MARKING_TYPE_UNSPECIFIED: MarkingType
MARKING_TYPE_UNKNOWN: MarkingType
MARKING_TYPE_SOLID: MarkingType
MARKING_TYPE_DASHED: MarkingType
MARKING_COLOR_UNSPECIFIED: MarkingColor
MARKING_COLOR_UNKNOWN: MarkingColor
MARKING_COLOR_WHITE: MarkingColor
MARKING_COLOR_YELLOW: MarkingColor
DEPARTURE_SIDE_UNSPECIFIED: DepartureSide
DEPARTURE_SIDE_NONE: DepartureSide
DEPARTURE_SIDE_LEFT: DepartureSide
DEPARTURE_SIDE_RIGHT: DepartureSide
WITHHELD_BY_UNSPECIFIED: WithheldBy
WITHHELD_BY_NONE: WithheldBy
WITHHELD_BY_INDICATOR: WithheldBy
WITHHELD_BY_SLOW: WithheldBy
DEPARTURE_STATE_UNSPECIFIED: DepartureState
DEPARTURE_STATE_NONE: DepartureState
DEPARTURE_STATE_WARNING: DepartureState
DEPARTURE_STATE_WITHHELD: DepartureState
LANE_CHANGE_UNSPECIFIED: LaneChange
LANE_CHANGE_NONE: LaneChange
LANE_CHANGE_LEFT: LaneChange
LANE_CHANGE_RIGHT: LaneChange

class LaneFrame(_message.Message):
    __slots__ = ("schema", "device", "camera", "boot_id", "frame_id", "seq", "dropped", "status", "reasons", "time", "latency_us", "image", "model", "lanes", "ego", "calib_id", "reason_details", "vehicle")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    EGO_FIELD_NUMBER: _ClassVar[int]
    CALIB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_DETAILS_FIELD_NUMBER: _ClassVar[int]
    VEHICLE_FIELD_NUMBER: _ClassVar[int]
    schema: str
    device: str
    camera: str
    boot_id: str
    frame_id: int
    seq: int
    dropped: int
    status: FrameStatus
    reasons: _containers.RepeatedScalarFieldContainer[str]
    time: FrameTime
    latency_us: StageLatency
    image: ImageSize
    model: ModelVersion
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    ego: Ego
    calib_id: str
    reason_details: _containers.RepeatedCompositeFieldContainer[Reason]
    vehicle: UsedVehicleState
    def __init__(self, schema: _Optional[str] = ..., device: _Optional[str] = ..., camera: _Optional[str] = ..., boot_id: _Optional[str] = ..., frame_id: _Optional[int] = ..., seq: _Optional[int] = ..., dropped: _Optional[int] = ..., status: _Optional[_Union[FrameStatus, str]] = ..., reasons: _Optional[_Iterable[str]] = ..., time: _Optional[_Union[FrameTime, _Mapping]] = ..., latency_us: _Optional[_Union[StageLatency, _Mapping]] = ..., image: _Optional[_Union[ImageSize, _Mapping]] = ..., model: _Optional[_Union[ModelVersion, _Mapping]] = ..., lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., ego: _Optional[_Union[Ego, _Mapping]] = ..., calib_id: _Optional[str] = ..., reason_details: _Optional[_Iterable[_Union[Reason, _Mapping]]] = ..., vehicle: _Optional[_Union[UsedVehicleState, _Mapping]] = ...) -> None: ...

class Reason(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: ReasonCode
    text: str
    def __init__(self, code: _Optional[_Union[ReasonCode, str]] = ..., text: _Optional[str] = ...) -> None: ...

class UsedVehicleState(_message.Message):
    __slots__ = ("speed_mps", "yaw_rate_radps", "indicator", "age_us")
    SPEED_MPS_FIELD_NUMBER: _ClassVar[int]
    YAW_RATE_RADPS_FIELD_NUMBER: _ClassVar[int]
    INDICATOR_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    speed_mps: float
    yaw_rate_radps: float
    indicator: Indicator
    age_us: int
    def __init__(self, speed_mps: _Optional[float] = ..., yaw_rate_radps: _Optional[float] = ..., indicator: _Optional[_Union[Indicator, str]] = ..., age_us: _Optional[int] = ...) -> None: ...

class FrameTime(_message.Message):
    __slots__ = ("capture_mono_ns", "capture_epoch_ns", "capture_time", "age_us", "clock", "wall_clock")
    CAPTURE_MONO_NS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_EPOCH_NS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_TIME_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    WALL_CLOCK_FIELD_NUMBER: _ClassVar[int]
    capture_mono_ns: int
    capture_epoch_ns: int
    capture_time: _timestamp_pb2.Timestamp
    age_us: int
    clock: CaptureClock
    wall_clock: WallClock
    def __init__(self, capture_mono_ns: _Optional[int] = ..., capture_epoch_ns: _Optional[int] = ..., capture_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., age_us: _Optional[int] = ..., clock: _Optional[_Union[CaptureClock, _Mapping]] = ..., wall_clock: _Optional[_Union[WallClock, str]] = ...) -> None: ...

class CaptureClock(_message.Message):
    __slots__ = ("source", "uncertainty_us")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_US_FIELD_NUMBER: _ClassVar[int]
    source: ClockSource
    uncertainty_us: int
    def __init__(self, source: _Optional[_Union[ClockSource, str]] = ..., uncertainty_us: _Optional[int] = ...) -> None: ...

class StageLatency(_message.Message):
    __slots__ = ("queue", "preprocess", "infer", "postprocess")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_FIELD_NUMBER: _ClassVar[int]
    INFER_FIELD_NUMBER: _ClassVar[int]
    POSTPROCESS_FIELD_NUMBER: _ClassVar[int]
    queue: int
    preprocess: int
    infer: int
    postprocess: int
    def __init__(self, queue: _Optional[int] = ..., preprocess: _Optional[int] = ..., infer: _Optional[int] = ..., postprocess: _Optional[int] = ...) -> None: ...

class ImageSize(_message.Message):
    __slots__ = ("width", "height")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    width: int
    height: int
    def __init__(self, width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class ModelVersion(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("id", "index", "confidence", "type", "color", "image_points", "ground", "predicted")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    COLOR_FIELD_NUMBER: _ClassVar[int]
    IMAGE_POINTS_FIELD_NUMBER: _ClassVar[int]
    GROUND_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    index: int
    confidence: float
    type: MarkingType
    color: MarkingColor
    image_points: ImagePoints
    ground: GroundLane
    predicted: bool
    def __init__(self, id: _Optional[int] = ..., index: _Optional[int] = ..., confidence: _Optional[float] = ..., type: _Optional[_Union[MarkingType, str]] = ..., color: _Optional[_Union[MarkingColor, str]] = ..., image_points: _Optional[_Union[ImagePoints, _Mapping]] = ..., ground: _Optional[_Union[GroundLane, _Mapping]] = ..., predicted: bool = ...) -> None: ...

class ImagePoints(_message.Message):
    __slots__ = ("x", "y")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    x: _containers.RepeatedScalarFieldContainer[float]
    y: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, x: _Optional[_Iterable[float]] = ..., y: _Optional[_Iterable[float]] = ...) -> None: ...

class GroundLane(_message.Message):
    __slots__ = ("points", "polynomial")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    POLYNOMIAL_FIELD_NUMBER: _ClassVar[int]
    points: GroundPoints
    polynomial: Polynomial
    def __init__(self, points: _Optional[_Union[GroundPoints, _Mapping]] = ..., polynomial: _Optional[_Union[Polynomial, _Mapping]] = ...) -> None: ...

class GroundPoints(_message.Message):
    __slots__ = ("x", "y")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    x: _containers.RepeatedScalarFieldContainer[float]
    y: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, x: _Optional[_Iterable[float]] = ..., y: _Optional[_Iterable[float]] = ...) -> None: ...

class Polynomial(_message.Message):
    __slots__ = ("c0", "c1", "c2", "c3", "x_min_m", "x_max_m", "covariance")
    C0_FIELD_NUMBER: _ClassVar[int]
    C1_FIELD_NUMBER: _ClassVar[int]
    C2_FIELD_NUMBER: _ClassVar[int]
    C3_FIELD_NUMBER: _ClassVar[int]
    X_MIN_M_FIELD_NUMBER: _ClassVar[int]
    X_MAX_M_FIELD_NUMBER: _ClassVar[int]
    COVARIANCE_FIELD_NUMBER: _ClassVar[int]
    c0: float
    c1: float
    c2: float
    c3: float
    x_min_m: float
    x_max_m: float
    covariance: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, c0: _Optional[float] = ..., c1: _Optional[float] = ..., c2: _Optional[float] = ..., c3: _Optional[float] = ..., x_min_m: _Optional[float] = ..., x_max_m: _Optional[float] = ..., covariance: _Optional[_Iterable[float]] = ...) -> None: ...

class Ego(_message.Message):
    __slots__ = ("lateral_offset_m", "lateral_offset_std_m", "heading_error_rad", "curvature_1pm", "lane_width_m", "lane_change", "departure", "heading_error_std_rad", "curvature_std_1pm", "lane_width_std_m", "left", "right")
    LATERAL_OFFSET_M_FIELD_NUMBER: _ClassVar[int]
    LATERAL_OFFSET_STD_M_FIELD_NUMBER: _ClassVar[int]
    HEADING_ERROR_RAD_FIELD_NUMBER: _ClassVar[int]
    CURVATURE_1PM_FIELD_NUMBER: _ClassVar[int]
    LANE_WIDTH_M_FIELD_NUMBER: _ClassVar[int]
    LANE_CHANGE_FIELD_NUMBER: _ClassVar[int]
    DEPARTURE_FIELD_NUMBER: _ClassVar[int]
    HEADING_ERROR_STD_RAD_FIELD_NUMBER: _ClassVar[int]
    CURVATURE_STD_1PM_FIELD_NUMBER: _ClassVar[int]
    LANE_WIDTH_STD_M_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    lateral_offset_m: float
    lateral_offset_std_m: float
    heading_error_rad: float
    curvature_1pm: float
    lane_width_m: float
    lane_change: LaneChange
    departure: Departure
    heading_error_std_rad: float
    curvature_std_1pm: float
    lane_width_std_m: float
    left: LineDistance
    right: LineDistance
    def __init__(self, lateral_offset_m: _Optional[float] = ..., lateral_offset_std_m: _Optional[float] = ..., heading_error_rad: _Optional[float] = ..., curvature_1pm: _Optional[float] = ..., lane_width_m: _Optional[float] = ..., lane_change: _Optional[_Union[LaneChange, str]] = ..., departure: _Optional[_Union[Departure, _Mapping]] = ..., heading_error_std_rad: _Optional[float] = ..., curvature_std_1pm: _Optional[float] = ..., lane_width_std_m: _Optional[float] = ..., left: _Optional[_Union[LineDistance, _Mapping]] = ..., right: _Optional[_Union[LineDistance, _Mapping]] = ...) -> None: ...

class LineDistance(_message.Message):
    __slots__ = ("distance_m", "distance_std_m", "time_s")
    DISTANCE_M_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_STD_M_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    distance_m: float
    distance_std_m: float
    time_s: float
    def __init__(self, distance_m: _Optional[float] = ..., distance_std_m: _Optional[float] = ..., time_s: _Optional[float] = ...) -> None: ...

class Departure(_message.Message):
    __slots__ = ("state", "side", "withheld_by", "side_code", "withheld_by_code")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_BY_FIELD_NUMBER: _ClassVar[int]
    SIDE_CODE_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_BY_CODE_FIELD_NUMBER: _ClassVar[int]
    state: DepartureState
    side: str
    withheld_by: str
    side_code: DepartureSide
    withheld_by_code: WithheldBy
    def __init__(self, state: _Optional[_Union[DepartureState, str]] = ..., side: _Optional[str] = ..., withheld_by: _Optional[str] = ..., side_code: _Optional[_Union[DepartureSide, str]] = ..., withheld_by_code: _Optional[_Union[WithheldBy, str]] = ...) -> None: ...
