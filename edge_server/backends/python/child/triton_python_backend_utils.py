"""The module `triton_python_backend_utils` (`pb_utils`) of a model; names are Triton's."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.python.child.errors import TritonError, TritonModelException
from edge_server.backends.python.child.inference import (
    RELEASE_ALL,
    InferenceRequest,
    ResponseIterator,
)
from edge_server.backends.python.child.link import here
from edge_server.backends.python.child.loading import is_model_ready, load_model, unload_model
from edge_server.backends.python.child.logger import Logger
from edge_server.backends.python.child.metrics import Metric, MetricFamily
from edge_server.backends.python.child.model_config import ModelConfig
from edge_server.backends.python.child.response import InferenceResponse
from edge_server.backends.python.child.response_sender import (
    COMPLETE_FINAL,
    InferenceResponseSender,
)
from edge_server.backends.python.child.tensor import DATA_TYPES, Tensor
from edge_server.backends.python.packing import encode_bytes
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

TRITON_STRING_TO_NUMPY = {
    datatype.config_name: datatype.numpy.type
    for datatype in DATA_TYPES
    if datatype is not DataType.BF16
}

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


@dataclass(frozen=True)
class PreferredMemory:
    """The caller's preferred memory for the response, which is always host memory here."""

    preferred_memory_type: int
    preferred_device_id: int = 0


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((t for t in inference_request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((t for t in inference_response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((c for c in model_config.get("input", []) if c["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((c for c in model_config.get("output", []) if c["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    return DATA_TYPES[data_type - 1].numpy.type


def numpy_to_triton_type(data_type: Any) -> int:
    dtype = np.dtype(data_type)
    datatype = DataType.BYTES if dtype.type is np.bytes_ else DataType.from_numpy(dtype)
    if datatype is None:
        raise TritonModelException("NumPy dtype is not supported.")
    return DATA_TYPES.index(datatype) + 1


def triton_string_to_numpy(triton_type_string: str) -> Any:
    return TRITON_STRING_TO_NUMPY.get(triton_type_string)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()] | None:
    """Encode elements in C order, each behind its 4-byte little-endian length; None if not of
    bytes."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type is not np.bytes_:
        return None
    return encode_bytes(input_tensor).tobytes()


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """Return a flat array of the `bytes` elements that `serialize_byte_tensor` wrote."""
    elements = []
    begin = 0
    while begin < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, begin)
        begin += 4
        elements.append(bytes(encoded_tensor[begin : begin + length]))
        begin += length
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def get_model_dir() -> str:
    """Return the version directory."""
    return here.model_directory
