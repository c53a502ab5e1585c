"""Enumerations and the classes that callers derive from."""

from __future__ import annotations

import enum

import numpy as np


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorFormat(enum.Enum):
    LINEAR = 0
    CHW2 = 1
    HWC8 = 2
    CHW4 = 3
    CHW16 = 4
    CHW32 = 5


class Dims(tuple):
    """As TensorRT's: a sequence, and no tuple of Python's own to compare with."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("trt.Dims are not compared: make a tuple of them")

    __hash__ = None


class NoDims:
    """What TensorRT answers where there is no shape: of -1 dimensions, for which Python raises."""

    def __len__(self) -> int:
        return -1  # noqa: PLE0303 - so it is

    def __getitem__(self, index: int) -> int:
        raise IndexError


class ILogger:
    class _Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    INTERNAL_ERROR = _Severity.INTERNAL_ERROR
    ERROR = _Severity.ERROR
    WARNING = _Severity.WARNING
    INFO = _Severity.INFO
    VERBOSE = _Severity.VERBOSE

    def __init__(self) -> None:
        self._is_made = True


class IOutputAllocator:
    def __init__(self) -> None:
        self._is_made = True


NUMPY = {
    DataType.FLOAT: np.dtype("<f4"),
    DataType.HALF: np.dtype("<f2"),
    DataType.INT8: np.dtype("i1"),
    DataType.INT32: np.dtype("<i4"),
    DataType.BOOL: np.dtype("?"),
    DataType.UINT8: np.dtype("u1"),
    DataType.INT64: np.dtype("<i8"),
}
OF_ONNX = {
    "tensor(float)": DataType.FLOAT,
    "tensor(float16)": DataType.HALF,
    "tensor(int8)": DataType.INT8,
    "tensor(int32)": DataType.INT32,
    "tensor(bool)": DataType.BOOL,
    "tensor(uint8)": DataType.UINT8,
    "tensor(int64)": DataType.INT64,
}
