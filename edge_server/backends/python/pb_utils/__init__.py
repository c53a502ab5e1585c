"""The modules `triton_python_backend_utils` (`pb_utils`) and `c_python_backend_utils` of a model.

Names are Triton's. The module's name in this package is free of them, so `PbTensor` is a model's
`Tensor`, and `AutoCompleteConfig` its `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.python.link import here
from edge_server.backends.python.messages import SEQUENCE_END, SEQUENCE_START
from edge_server.backends.python.pb_utils import requests, server, tensor
from edge_server.backends.python.pb_utils.tensor import DATA_TYPES, type_of
from edge_server.backends.python.shared_memory import bytes_elements, encode_bytes
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping

InferenceRequest = requests.InferenceRequest
InferenceResponse = requests.InferenceResponse
InferenceResponseSender = requests.InferenceResponseSender
ResponseIterator = requests.ResponseIterator
Tensor = tensor.PbTensor
TritonError = tensor.TritonError
TritonModelException = tensor.TritonModelException
ModelConfig = server.AutoCompleteConfig
Logger = server.Logger
Metric = server.Metric
MetricFamily = server.MetricFamily
is_model_ready = server.is_model_ready
load_model = server.load_model
unload_model = server.unload_model

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = SEQUENCE_END
TRITONSERVER_RESPONSE_COMPLETE_FINAL = requests.COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = requests.RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

TRITON_STRING_TO_NUMPY = {
    datatype.config_name: datatype.numpy.type
    for datatype in DATA_TYPES
    if datatype is not DataType.BF16
}


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
    return DATA_TYPES.index(type_of(np.dtype(data_type))) + 1


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
    elements = list(bytes_elements(bytes(encoded_tensor)))
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def get_model_dir() -> str:
    return here.model_directory
