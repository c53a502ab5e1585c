from edge_server.proto.edge.lanes.v1 import lanes_pb2 as _lanes_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_LANES: _ClassVar[Task]
    TASK_DETECTION: _ClassVar[Task]
    TASK_SEGMENTATION: _ClassVar[Task]
    TASK_CLASSIFICATION: _ClassVar[Task]
    TASK_TENSORS: _ClassVar[Task]
TASK_UNSPECIFIED: Task
TASK_LANES: Task
TASK_DETECTION: Task
TASK_SEGMENTATION: Task
TASK_CLASSIFICATION: Task
TASK_TENSORS: Task

class StreamNetworksRequest(_message.Message):
    __slots__ = ("networks", "max_hz", "window", "acknowledged")
    NETWORKS_FIELD_NUMBER: _ClassVar[int]
    MAX_HZ_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    networks: _containers.RepeatedScalarFieldContainer[str]
    max_hz: float
    window: int
    acknowledged: int
    def __init__(self, networks: _Optional[_Iterable[str]] = ..., max_hz: _Optional[float] = ..., window: _Optional[int] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class StreamNetworksResponse(_message.Message):
    __slots__ = ("sequence", "frame", "lost")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    frame: NetworkFrame
    lost: int
    def __init__(self, sequence: _Optional[int] = ..., frame: _Optional[_Union[NetworkFrame, _Mapping]] = ..., lost: _Optional[int] = ...) -> None: ...

class NetworkFrame(_message.Message):
    __slots__ = ("schema", "device", "camera", "boot_id", "frame_id", "seq", "dropped", "status", "reasons", "time", "latency_us", "image", "model", "calib_id", "reason_details", "network", "task", "detections", "segmentation", "classes", "tensors", "lanes")
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
    CALIB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_DETAILS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DETECTIONS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTATION_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    schema: str
    device: str
    camera: str
    boot_id: str
    frame_id: int
    seq: int
    dropped: int
    status: _lanes_pb2.FrameStatus
    reasons: _containers.RepeatedScalarFieldContainer[str]
    time: _lanes_pb2.FrameTime
    latency_us: _lanes_pb2.StageLatency
    image: _lanes_pb2.ImageSize
    model: _lanes_pb2.ModelVersion
    calib_id: str
    reason_details: _containers.RepeatedCompositeFieldContainer[_lanes_pb2.Reason]
    network: str
    task: Task
    detections: _containers.RepeatedCompositeFieldContainer[Detection]
    segmentation: Segmentation
    classes: _containers.RepeatedCompositeFieldContainer[ClassScore]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorShape]
    lanes: _containers.RepeatedCompositeFieldContainer[_lanes_pb2.Lane]
    def __init__(self, schema: _Optional[str] = ..., device: _Optional[str] = ..., camera: _Optional[str] = ..., boot_id: _Optional[str] = ..., frame_id: _Optional[int] = ..., seq: _Optional[int] = ..., dropped: _Optional[int] = ..., status: _Optional[_Union[_lanes_pb2.FrameStatus, str]] = ..., reasons: _Optional[_Iterable[str]] = ..., time: _Optional[_Union[_lanes_pb2.FrameTime, _Mapping]] = ..., latency_us: _Optional[_Union[_lanes_pb2.StageLatency, _Mapping]] = ..., image: _Optional[_Union[_lanes_pb2.ImageSize, _Mapping]] = ..., model: _Optional[_Union[_lanes_pb2.ModelVersion, _Mapping]] = ..., calib_id: _Optional[str] = ..., reason_details: _Optional[_Iterable[_Union[_lanes_pb2.Reason, _Mapping]]] = ..., network: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., detections: _Optional[_Iterable[_Union[Detection, _Mapping]]] = ..., segmentation: _Optional[_Union[Segmentation, _Mapping]] = ..., classes: _Optional[_Iterable[_Union[ClassScore, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorShape, _Mapping]]] = ..., lanes: _Optional[_Iterable[_Union[_lanes_pb2.Lane, _Mapping]]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("x_min", "y_min", "x_max", "y_max")
    X_MIN_FIELD_NUMBER: _ClassVar[int]
    Y_MIN_FIELD_NUMBER: _ClassVar[int]
    X_MAX_FIELD_NUMBER: _ClassVar[int]
    Y_MAX_FIELD_NUMBER: _ClassVar[int]
    x_min: float
    y_min: float
    x_max: float
    y_max: float
    def __init__(self, x_min: _Optional[float] = ..., y_min: _Optional[float] = ..., x_max: _Optional[float] = ..., y_max: _Optional[float] = ...) -> None: ...

class Detection(_message.Message):
    __slots__ = ("box", "class_id", "label", "confidence", "track_id", "ground")
    BOX_FIELD_NUMBER: _ClassVar[int]
    CLASS_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    TRACK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUND_FIELD_NUMBER: _ClassVar[int]
    box: Box
    class_id: int
    label: str
    confidence: float
    track_id: int
    ground: RoadPoint
    def __init__(self, box: _Optional[_Union[Box, _Mapping]] = ..., class_id: _Optional[int] = ..., label: _Optional[str] = ..., confidence: _Optional[float] = ..., track_id: _Optional[int] = ..., ground: _Optional[_Union[RoadPoint, _Mapping]] = ...) -> None: ...

class RoadPoint(_message.Message):
    __slots__ = ("x_m", "y_m", "covariance")
    X_M_FIELD_NUMBER: _ClassVar[int]
    Y_M_FIELD_NUMBER: _ClassVar[int]
    COVARIANCE_FIELD_NUMBER: _ClassVar[int]
    x_m: float
    y_m: float
    covariance: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, x_m: _Optional[float] = ..., y_m: _Optional[float] = ..., covariance: _Optional[_Iterable[float]] = ...) -> None: ...

class Segmentation(_message.Message):
    __slots__ = ("region", "columns", "rows", "run_classes", "run_lengths", "outlines", "labels")
    REGION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RUN_CLASSES_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OUTLINES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    region: Box
    columns: int
    rows: int
    run_classes: _containers.RepeatedScalarFieldContainer[int]
    run_lengths: _containers.RepeatedScalarFieldContainer[int]
    outlines: _containers.RepeatedCompositeFieldContainer[Outline]
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, region: _Optional[_Union[Box, _Mapping]] = ..., columns: _Optional[int] = ..., rows: _Optional[int] = ..., run_classes: _Optional[_Iterable[int]] = ..., run_lengths: _Optional[_Iterable[int]] = ..., outlines: _Optional[_Iterable[_Union[Outline, _Mapping]]] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class Outline(_message.Message):
    __slots__ = ("class_id", "x", "y")
    CLASS_ID_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    class_id: int
    x: _containers.RepeatedScalarFieldContainer[float]
    y: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, class_id: _Optional[int] = ..., x: _Optional[_Iterable[float]] = ..., y: _Optional[_Iterable[float]] = ...) -> None: ...

class ClassScore(_message.Message):
    __slots__ = ("class_id", "label", "confidence")
    CLASS_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    class_id: int
    label: str
    confidence: float
    def __init__(self, class_id: _Optional[int] = ..., label: _Optional[str] = ..., confidence: _Optional[float] = ...) -> None: ...

class TensorShape(_message.Message):
    __slots__ = ("name", "datatype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATATYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    datatype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., datatype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...
