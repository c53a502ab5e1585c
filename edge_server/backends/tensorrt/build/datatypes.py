"""TensorRT's type names: its own table needs names that numpy has dropped, or lacks them."""

from __future__ import annotations

_NAMES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
_NUMPY = {
    "FLOAT": "<f4",
    "HALF": "<f2",
    "INT8": "i1",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "u1",
}


def datatype_name(name: str) -> str:
    """Return the protocol's name of TensorRT's type `name`; `name` itself if the protocol lacks
    it."""
    return _NAMES.get(name, name)


def numpy_type(name: str) -> str:
    """Return numpy's name of the type; `bool` for a type that calibration never reads."""
    return _NUMPY.get(name, "?")
