import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_STATUS_UNSPECIFIED: _ClassVar[FrameStatus]
    FRAME_STATUS_OK: _ClassVar[FrameStatus]
    FRAME_STATUS_DEGRADED: _ClassVar[FrameStatus]
    FRAME_STATUS_STALE: _ClassVar[FrameStatus]
    FRAME_STATUS_INVALID: _ClassVar[FrameStatus]

class ClockSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOCK_SOURCE_UNSPECIFIED: _ClassVar[ClockSource]
    CLOCK_SOURCE_ARRIVAL: _ClassVar[ClockSource]
    CLOCK_SOURCE_SENSOR: _ClassVar[ClockSource]
    CLOCK_SOURCE_RTP: _ClassVar[ClockSource]
    CLOCK_SOURCE_NTP: _ClassVar[ClockSource]
FRAME_STATUS_UNSPECIFIED: FrameStatus
FRAME_STATUS_OK: FrameStatus
FRAME_STATUS_DEGRADED: FrameStatus
FRAME_STATUS_STALE: FrameStatus
FRAME_STATUS_INVALID: FrameStatus
CLOCK_SOURCE_UNSPECIFIED: ClockSource
CLOCK_SOURCE_ARRIVAL: ClockSource
CLOCK_SOURCE_SENSOR: ClockSource
CLOCK_SOURCE_RTP: ClockSource
CLOCK_SOURCE_NTP: ClockSource

class LaneFrame(_message.Message):
    __slots__ = ("schema", "device", "camera", "boot_id", "frame_id", "seq", "dropped", "status", "reasons", "time", "latency_us", "image", "model", "lanes", "calib_id")
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
    CALIB_ID_FIELD_NUMBER: _ClassVar[int]
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
    calib_id: str
    def __init__(self, schema: _Optional[str] = ..., device: _Optional[str] = ..., camera: _Optional[str] = ..., boot_id: _Optional[str] = ..., frame_id: _Optional[int] = ..., seq: _Optional[int] = ..., dropped: _Optional[int] = ..., status: _Optional[_Union[FrameStatus, str]] = ..., reasons: _Optional[_Iterable[str]] = ..., time: _Optional[_Union[FrameTime, _Mapping]] = ..., latency_us: _Optional[_Union[StageLatency, _Mapping]] = ..., image: _Optional[_Union[ImageSize, _Mapping]] = ..., model: _Optional[_Union[ModelVersion, _Mapping]] = ..., lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., calib_id: _Optional[str] = ...) -> None: ...

class FrameTime(_message.Message):
    __slots__ = ("capture_mono_ns", "capture_epoch_ns", "capture_time", "age_us", "clock")
    CAPTURE_MONO_NS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_EPOCH_NS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_TIME_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    capture_mono_ns: int
    capture_epoch_ns: int
    capture_time: _timestamp_pb2.Timestamp
    age_us: int
    clock: CaptureClock
    def __init__(self, capture_mono_ns: _Optional[int] = ..., capture_epoch_ns: _Optional[int] = ..., capture_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., age_us: _Optional[int] = ..., clock: _Optional[_Union[CaptureClock, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("confidence", "image_points")
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_POINTS_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    image_points: ImagePoints
    def __init__(self, confidence: _Optional[float] = ..., image_points: _Optional[_Union[ImagePoints, _Mapping]] = ...) -> None: ...

class ImagePoints(_message.Message):
    __slots__ = ("x", "y")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    x: _containers.RepeatedScalarFieldContainer[float]
    y: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, x: _Optional[_Iterable[float]] = ..., y: _Optional[_Iterable[float]] = ...) -> None: ...
