"""Remedies for models whose backend Triton has and edge_server lacks."""

from __future__ import annotations

from types import MappingProxyType

_THEN = 'put it into the version directory as model.onnx, with backend: "onnxruntime"'
_WRAP = 'or load it in a model.py, with backend: "python"'

_TORCH = (
    'convert it with torch.onnx.export(torch.jit.load("model.pt"), (example,), "model.onnx", '
    f"dynamo=False) and {_THEN}; {_WRAP}"
)
_SAVED_MODEL = (
    "convert it with python -m tf2onnx.convert --saved-model model.savedmodel --output model.onnx "
    f"and {_THEN}; {_WRAP}"
)
_GRAPH = (
    "convert it with python -m tf2onnx.convert --graphdef model.graphdef --inputs NAME:0 "
    f"--outputs NAME:0 --output model.onnx and {_THEN}; {_WRAP}"
)
_OPENVINO = f"export the model that it was made of to ONNX and {_THEN}; {_WRAP}"
_PADDLE = (
    "convert it with paddle2onnx --model_dir DIR --model_filename model.pdmodel --params_filename "
    f"model.pdiparams --save_file model.onnx and {_THEN}; {_WRAP}"
)
_TREES = f"convert it with onnxmltools and {_THEN}; {_WRAP}"
_IMAGES = 'use backend: "image_preprocess" for images, or a model.py with backend: "python"'
_LANGUAGE = 'load it in a model.py, with backend: "python", where the board has room for it'

# By name in config.pbtxt: backends, and the platforms of Triton's older configurations.
_BY_NAME = MappingProxyType(
    {
        "pytorch": _TORCH,
        "pytorch_libtorch": _TORCH,
        "tensorflow": _SAVED_MODEL,
        "tensorflow_savedmodel": _SAVED_MODEL,
        "tensorflow_graphdef": _GRAPH,
        "openvino": _OPENVINO,
        "paddle": _PADDLE,
        "fil": _TREES,
        "dali": _IMAGES,
        "vllm": _LANGUAGE,
        "tensorrtllm": _LANGUAGE,
    }
)
# By file name in a version directory.
_BY_FILE = MappingProxyType(
    {
        "model.pt": _TORCH,
        "model.savedmodel": _SAVED_MODEL,
        "model.graphdef": _GRAPH,
        "model.xml": _OPENVINO,
        "model.pdmodel": _PADDLE,
    }
)
FILES = tuple(_BY_FILE)


def remedy_for(name: str) -> str:
    """The remedy for a model of that backend or platform, to follow the text of the fault.

    Empty for a name that is none of Triton's.
    """
    return f"; '{name}' is not built here: {_BY_NAME[name]}" if name in _BY_NAME else ""


def remedy_for_file(filename: str) -> str:
    """The remedy for a model with this file, one of `FILES`."""
    return f"{filename} is of a backend that is not built here: {_BY_FILE[filename]}"
