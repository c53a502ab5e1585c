"""The table of backends: name in config.pbtxt → module, imported when a model first needs it."""

from __future__ import annotations

import importlib
import logging
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from edge_server.board.installation import remedy
from edge_server.errors import EdgeServerError, ModelConfigError

if TYPE_CHECKING:
    from edge_server.backends.contract import Backend
    from edge_server.gpu.device import Devices

log = logging.getLogger(__name__)

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


def load_libraries(devices: Devices) -> None:
    """Load TensorRT, where it and a GPU are here; for the time before anything serves: its import
    and its first runtime hold Python's lock for seconds on a board."""
    # Without a driver, a runtime crashes.
    if not devices.count or find_spec("tensorrt") is None:
        return
    began = time.monotonic()
    try:
        engine = importlib.import_module("edge_server.backends.tensorrt.engine")
        version = engine.facts_of(devices.gpu()).tensorrt
    except (ImportError, OSError, EdgeServerError) as error:
        # Models that need it say so with their remedy.
        log.warning("tensorrt: cannot be loaded: %s", error)
    else:
        log.info("tensorrt: %s, loaded in %.1f s", version, time.monotonic() - began)


def find_backend(name: str) -> Backend:
    """Return the backend registered as `name`. Raises ModelConfigError where there is none of that
    name, or a library that it needs is not installed."""
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
