"""The table of backends: name in config.pbtxt → module, imported when a model first needs it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from edge_server.board.installation import remedy
from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from edge_server.backends.contract import Backend

BACKENDS = {
    "onnxruntime": "edge_server.backends.onnxruntime",
    "image_preprocess": "edge_server.backends.vision.image_preprocess",
    "lane_decode": "edge_server.backends.vision.lane_decode",
    "identity": "edge_server.backends.vision.identity",
    "python": "edge_server.backends.python.backend",
    "tensorrt": "edge_server.backends.tensorrt.backend",
    **dict.fromkeys(
        ("pytorch", "tensorflow", "openvino", "paddle"), "edge_server.backends.frameworks.backend"
    ),
}


def find_backend(name: str) -> Backend:
    """Return the backend registered as `name`.

    Raises:
        ModelConfigError: no backend has that name, or a library that the backend needs is not
            installed.
    """
    if name not in BACKENDS:
        raise ModelConfigError(f"no backend '{name}'; known: {', '.join(sorted(BACKENDS))}")
    try:
        return cast("Backend", importlib.import_module(BACKENDS[name]))
    except ImportError as error:
        raise ModelConfigError(
            f"backend '{name}' cannot be used here: {error}; {remedy(error.name or '')}"
        ) from error


def missing_library(name: str) -> str:
    """Return the library of a device that backend `name` needs and that is not installed, or ""."""
    return "TensorRT" if name == "tensorrt" and find_spec("tensorrt") is None else ""
