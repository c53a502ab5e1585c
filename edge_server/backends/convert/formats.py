"""The formats of models: what a file is of, what can be made of it, and which step does that."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.backends.convert.environments import ONNX, OPENVINO, PADDLE, TENSORFLOW, TORCH
from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edge_server.backends.convert.environments import FrameworkPackages

_TENSORFLOW = "tensorflow_models"


@dataclass(frozen=True)
class SourceFormat:
    """A format that models come in.

    Attributes:
        text: the format in a sentence.
        framework: what reads it.
        module: the module of `steps` that reads it.
        functions: destination → the function of that module that writes it.
    """

    text: str
    framework: FrameworkPackages
    module: str
    functions: Mapping[str, str]


@dataclass(frozen=True)
class Destination:
    """A format that models are converted to.

    Attributes:
        file: its name in a version directory.
        fields: of config.pbtxt, that name its backend.
        framework: what runs it.
        runner: the function of a module of `steps` that runs it.
    """

    file: str
    fields: Mapping[str, str]
    framework: FrameworkPackages
    runner: tuple[str, str]


SOURCES: Mapping[str, SourceFormat] = MappingProxyType(
    {
        "onnx": SourceFormat("an ONNX file", ONNX, "onnx_models", {"onnx": "take"}),
        "keras": SourceFormat(
            "a Keras model",
            TENSORFLOW,
            _TENSORFLOW,
            {"onnx": "keras_to_onnx", "graphdef": "keras_to_graphdef"},
        ),
        "savedmodel": SourceFormat(
            "a TensorFlow SavedModel",
            TENSORFLOW,
            _TENSORFLOW,
            {"onnx": "saved_model_to_onnx", "graphdef": "saved_model_to_graphdef"},
        ),
        "graphdef": SourceFormat(
            "a frozen TensorFlow GraphDef", TENSORFLOW, _TENSORFLOW, {"onnx": "graphdef_to_onnx"}
        ),
        "torchscript": SourceFormat(
            "a TorchScript file", TORCH, "torch_models", {"onnx": "script_to_onnx"}
        ),
        "torch-export": SourceFormat(
            "a program of torch.export", TORCH, "torch_models", {"onnx": "program_to_onnx"}
        ),
        "torch-module": SourceFormat(
            "a pickled PyTorch module", TORCH, "torch_models", {"onnx": "module_to_onnx"}
        ),
        "torch-weights": SourceFormat(
            "a PyTorch checkpoint", TORCH, "torch_models", {"onnx": "weights_to_onnx"}
        ),
        "paddle": SourceFormat(
            "a Paddle inference model", PADDLE, "paddle_models", {"onnx": "to_onnx"}
        ),
    }
)

DESTINATIONS: Mapping[str, Destination] = MappingProxyType(
    {
        "onnx": Destination(
            "model.onnx", {"platform": "onnxruntime_onnx"}, ONNX, ("onnx_models", "run")
        ),
        "graphdef": Destination(
            "model.graphdef",
            {"platform": "tensorflow_graphdef"},
            TENSORFLOW,
            (_TENSORFLOW, "run_graphdef"),
        ),
        "openvino": Destination(
            "model.xml", {"backend": "openvino"}, OPENVINO, ("openvino_models", "run")
        ),
        # Its own verb builds and verifies it, of the ONNX file that lies beside it.
        "plan": Destination(
            "model.onnx", {"platform": "tensorrt_plan"}, ONNX, ("onnx_models", "run")
        ),
    }
)

# The file of a version directory, and the format it is of; None looks into the file.
_BY_SUFFIX = {
    ".onnx": "onnx",
    ".keras": "keras",
    ".h5": "keras",
    ".hdf5": "keras",
    ".pb": "graphdef",
    ".graphdef": "graphdef",
    ".pdmodel": "paddle",
    ".json": "paddle",
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ts"), "torch"),
}
_NO_SOURCES = {
    ".plan": "a TensorRT plan belongs to one GPU; convert the file that it was built of",
    ".engine": "a TensorRT plan belongs to one GPU; convert the file that it was built of",
    ".xml": "OpenVINO's files are not converted further; convert what they were made of",
    ".tflite": "TensorFlow Lite's files are not converted; convert the Keras model or SavedModel",
    ".ckpt": "a checkpoint has weights only; export the model that it belongs to",
}
_IN_A_VERSION = (
    "model.onnx",
    "model.savedmodel",
    "model.graphdef",
    "model.pt",
    "model.pt2",
    "model.keras",
    "model.h5",
    "model.pdmodel",
    "model.json",
)


def source_format(path: Path) -> str:
    """Return the name in `SOURCES` of the model at `path`.

    Raises:
        ModelConfigError: there is none there, or one that cannot be converted.
    """
    if path.is_dir():
        if (path / "saved_model.pb").is_file():
            return "savedmodel"
        if paddle_program(path) is not None:
            return "paddle"
        raise ModelConfigError(
            f"{path}: no model is in this directory: neither config.pbtxt nor saved_model.pb, nor "
            "a Paddle program with its .pdiparams; give the model's file"
        )
    if not path.is_file():
        raise ModelConfigError(f"{path}: no such file; give the model to convert")
    suffix = path.suffix.lower()
    if suffix in _NO_SOURCES:
        raise ModelConfigError(f"{path}: {_NO_SOURCES[suffix]}")
    known = _BY_SUFFIX.get(suffix)
    if known is None:
        raise ModelConfigError(
            f"{path}: its format is unknown; known are {', '.join(sorted(_BY_SUFFIX))}, "
            "directories of SavedModels and of Paddle, and a model's directory; --from "
            "names the format"
        )
    return _torch_format(path) if known == "torch" else known


def paddle_program(path: Path) -> Path | None:
    """Return the program of the Paddle model at `path`, a file of it or its directory, or None."""
    places = [path.with_suffix(s) for s in (".json", ".pdmodel")]
    if path.is_dir():
        places = [*sorted(path.glob("*.json")), *sorted(path.glob("*.pdmodel"))]
    return next((p for p in places if p.is_file() and p.with_suffix(".pdiparams").is_file()), None)


def file_in_version(directory: Path, filename: str) -> Path:
    """Return the model in a version directory of a Triton repository.

    Args:
        directory: of the version.
        filename: as the configuration names it; empty without.

    Raises:
        ModelConfigError: there is none.
    """
    names = (filename,) if filename else _IN_A_VERSION
    found = next((directory / name for name in names if (directory / name).exists()), None)
    if found is None:
        raise ModelConfigError(
            f"{directory}: no {' or '.join(names)}; give the model's file itself"
        )
    return found


def _torch_format(path: Path) -> str:
    """Look into a file of PyTorch's, a zip since version 1.6, without unpickling anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
            names += archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelConfigError(
            f"{path}: no file of PyTorch 1.6 or later ({error}); save it again with a later one"
        ) from error
    if any("aotinductor" in name for name in names):
        raise ModelConfigError(
            f"{path}: holds machine code for one processor (AOTInductor); convert what "
            "torch.export.save has written of the same model"
        )
    if "constants.pkl" in names:
        return "torchscript"
    if any(name.startswith(("serialized_exported_program", "models/")) for name in names):
        return "torch-export"
    return "torch-module"
