"""The module `c_python_backend_utils` of a model: the classes that are C++ in Triton."""

from __future__ import annotations

from edge_server.backends.python.child.errors import TritonError, TritonModelException
from edge_server.backends.python.child.inference import InferenceRequest, ResponseIterator
from edge_server.backends.python.child.logger import Logger
from edge_server.backends.python.child.metrics import Metric, MetricFamily
from edge_server.backends.python.child.response import InferenceResponse
from edge_server.backends.python.child.response_sender import InferenceResponseSender
from edge_server.backends.python.child.tensor import Tensor
from edge_server.backends.python.child.triton_python_backend_utils import (
    PreferredMemory,
    is_model_ready,
    load_model,
    unload_model,
)

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "Metric",
    "MetricFamily",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "unload_model",
]
