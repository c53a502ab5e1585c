"""What a model file is of, what can be made of it, which interpreter does that, and the directory
of the result."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import text_format

from edge_server.errors import ModelConfigError, SettingsError, Unavailable
from edge_server.model_config.files import CONFIG_NAME, read_labels
from edge_server.model_config.parse import read_model_config
from edge_server.process.child import ChildFailed, examined
from edge_server.process.in_child import missing
from edge_server.repository.scan import files_in
from edge_server.tensors import DataType
from edge_server.tools.convert.steps.step import TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.tools.convert.steps.step import TensorInfo


@dataclass(frozen=True)
class FrameworkPackages:
    """Packages that a step needs together.

    Attributes:
        name: in texts and paths.
        modules: what must be importable.
        requirements: what pip installs for that, each line a call of pip.
        size_mb: of the environment, roughly.
        is_ours: the daemon uses it itself, so that this interpreter's is good enough.
    """

    name: str
    modules: tuple[str, ...]
    requirements: tuple[tuple[str, ...], ...]
    size_mb: int
    is_ours: bool = False

    @property
    def pip_lines(self) -> list[str]:
        return [f"pip install {shlex.join(line)}" for line in self.requirements]


# So that the environment can be one of `[python] interpreters`, too.
_TO_SERVE = "msgspec>=0.19,<1"
_IS_PC = platform.machine() == "x86_64"
# PyPI's PyTorch for PCs comes with CUDA, some gigabytes that no conversion uses. Of one version pip
# prefers the one for CPUs, 2.13.0+cpu.
_CPU_WHEELS = ("--extra-index-url", "https://download.pytorch.org/whl/cpu") if _IS_PC else ()

ONNX = FrameworkPackages(
    "onnx",
    ("onnx", "onnxruntime"),
    (("onnx>=1.17,<2", "onnxruntime>=1.20,<2"),),
    200,
    is_ours=True,
)
SIMPLIFIER = FrameworkPackages(
    "onnxsim",
    (*ONNX.modules, "onnxsim"),
    ((*ONNX.requirements[0], "onnxsim>=0.4.36,<0.9"),),
    220,
    is_ours=True,
)
TENSORFLOW = FrameworkPackages(
    "tensorflow",
    ("tensorflow", "tf2onnx"),
    # tensorflow-cpu has no wheels for ARM, where tensorflow has no CUDA either.
    ((f"tensorflow{'-cpu' if _IS_PC else ''}>=2.18,<2.22", "tf2onnx>=1.17,<1.18", _TO_SERVE),),
    1650,
)
TORCH = FrameworkPackages(
    "torch",
    ("torch", "onnxscript", "onnx"),
    (
        (*_CPU_WHEELS, "torch>=2.6,<3"),
        ("onnx>=1.17,<2", "onnxscript>=0.5,<0.8", "numpy>=1.26,<3", _TO_SERVE),
    ),
    1100,
)
PADDLE = FrameworkPackages(
    "paddle",
    ("paddle", "paddle2onnx"),
    (("paddlepaddle>=3.2,<3.4", "paddle2onnx>=2.1,<2.2", _TO_SERVE),),
    1000,
)
OPENVINO = FrameworkPackages(
    "openvino", ("openvino",), (("openvino>=2025.0,<2027", _TO_SERVE),), 200
)


def interpreter_having(framework: FrameworkPackages, pythons: Sequence[Path]) -> Path:
    """Return an interpreter that has `framework`: one of `pythons`, which the user names, or ours.

    Raises:
        Unavailable: none has it; the text has the commands that make one.
        SettingsError: an interpreter that the user names is none.
    """
    for each in pythons:
        # The steps run in other directories; a link into a virtual environment stays one.
        python = Path(shutil.which(each) or each).absolute()
        if not lacks(python, framework.modules):
            return python
    if not (here := missing(framework.modules)):
        return Path(sys.executable)
    there = f"~/{framework.name}"
    commands = [f"{there}/bin/{line}" for line in framework.pip_lines]
    raise Unavailable(
        f"{', '.join(here)}: not installed here; --python FILE names an interpreter that has it; "
        f"{framework.size_mb} MB make one: python3 -m venv {there} && {' && '.join(commands)}, "
        f"which is then --python {there}/bin/python"
    )


def lacks(python: Path, modules: Sequence[str]) -> list[str]:
    """Return those of `modules` that `python` cannot import.

    Raises:
        SettingsError: it is no Python.
    """
    try:
        return examined(str(python), modules)[1]
    except (OSError, ChildFailed) as error:
        raise SettingsError(f"--python {python}: is no Python that starts: {error}") from error


_TENSORFLOW = "tensorflow_models"


@dataclass(frozen=True)
class SourceFormat:
    """A format that models come in: `functions` of `module`, which is one of `steps`, write a
    destination."""

    text: str
    framework: FrameworkPackages
    module: str
    functions: Mapping[str, str]


@dataclass(frozen=True)
class Destination:
    """A format that models are converted to: `fields` of config.pbtxt name its backend, `runner` is
    the function of a module of `steps` that runs it."""

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
        "tf1-checkpoint": SourceFormat(
            "a checkpoint of TensorFlow 1",
            TENSORFLOW,
            _TENSORFLOW,
            {"onnx": "checkpoint_to_onnx", "graphdef": "checkpoint_to_graphdef"},
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
    ".meta": "tf1-checkpoint",
    ".pdmodel": "paddle",
    ".json": "paddle",
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ts"), "torch"),
}
_NO_SOURCES = {
    ".plan": "a TensorRT plan belongs to one GPU; convert the file that it was built of",
    ".engine": "a TensorRT plan belongs to one GPU; convert the file that it was built of",
    ".xml": "OpenVINO's files are not converted further; convert what they were made of",
    ".tflite": "TensorFlow Lite's files are not converted; convert the Keras model or SavedModel",
    ".ckpt": "a checkpoint has weights only; of TensorFlow 1 give the .meta file beside it, of "
    "PyTorch one of 1.6 or later",
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
    if suffix == ".ckpt" and zipfile.is_zipfile(path):
        return _torch_format(path)
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


# Triton's own, where it completes a configuration (default-max-batch-size).
MAX_BATCH_SIZE = 4


@dataclass(frozen=True)
class SourceModel:
    """The model to convert, and what its configuration adds to its file.

    Attributes:
        path: the file, or the directory of a SavedModel or of Paddle.
        inputs: name, datatype and shape, the batch dimension included; empty without
            configuration.
        outputs: the names; empty without configuration.
        labels: output → file of its labels.
        max_batch_size: None without configuration.
        kept: its fields that hold for the result too, as text.
        of_backend: likewise those that hold for a result of the backend `backend`.
    """

    path: Path
    inputs: tuple[tuple[str, str, list[int]], ...] = ()
    outputs: tuple[str, ...] = ()
    labels: Mapping[str, Path] = field(default_factory=dict)
    max_batch_size: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    kept: str = ""
    of_backend: str = ""
    backend: str = ""

    def fields_for(self, destination: Destination) -> tuple[str, str]:
        """Return the fields that the result keeps, and the names of those that it cannot keep."""
        if not self.of_backend or self.backend == _backend_of(**destination.fields):
            return self.kept + self.of_backend, ""
        names = (name for name in _OF_A_BACKEND if f"{name} {{" in self.of_backend)
        return self.kept, " and ".join(names)


_OF_EVERY_BACKEND = ("dynamic_batching", "response_cache")
_OF_A_BACKEND = ("instance_group", "optimization")


def _backend_of(backend: str = "", platform: str = "") -> str:
    return backend or platform.partition("_")[0]


def _fields_text(message: Any, names: Sequence[str]) -> str:
    kept = type(message)()
    kept.CopyFrom(message)
    for each, _ in message.ListFields():
        if each.name not in names:
            kept.ClearField(each.name)
    return text_format.MessageToString(kept)


def read_source(path: Path) -> SourceModel:
    """Return the model at `path`: a file, a SavedModel, or a model's directory of a repository."""
    is_model = path.is_dir() and (
        (path / CONFIG_NAME).exists() or any(each.name.isdecimal() for each in path.iterdir())
    )
    if not is_model:
        return SourceModel(path)
    files = files_in(path)
    if not files.versions:
        raise ModelConfigError(f"{path}: no version directory, like {path.name}/1")
    message = read_model_config(files.config_path)
    read_labels(message, files)
    batch = [-1] if message.max_batch_size > 0 else []
    file = file_in_version(files.versions[max(files.versions)], message.default_model_filename)
    of_file = "onnxruntime" if file.suffix == ".onnx" else ""
    return SourceModel(
        file,
        tuple((each.name, _datatype_name(each), [*batch, *_dims(each)]) for each in message.input),
        tuple(each.name for each in message.output),
        {o.name: path / o.label_filename for o in message.output if o.label_filename},
        message.max_batch_size if message.input else None,
        {name: value.string_value for name, value in message.parameters.items()},
        kept=_fields_text(message, _OF_EVERY_BACKEND),
        of_backend=_fields_text(message, _OF_A_BACKEND),
        backend=_backend_of(message.backend, message.platform) or of_file,
    )


def write_model(
    directory: Path,
    version: int,
    fields: Mapping[str, str],
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    *,
    labels: Mapping[str, Path],
    max_batch_size: int | None = None,
    more: str = "",
) -> Path:
    """Write config.pbtxt and labels into `directory`; return the version's new directory.

    Args:
        directory: of the model, whose name it is.
        fields: that name its backend.
        labels: output → file of its labels.
        max_batch_size: None is Triton's default where every tensor has an open first dimension.
        more: fields of config.pbtxt, as text.

    Raises:
        ModelConfigError: the batch size does not fit the tensors, or labels are of no output.
    """
    tensors = (*inputs, *outputs)
    batches = all(each["shape"][:1] == [-1] for each in tensors)
    # A network of one fixed batch size can have that one.
    fixed = next((t for t in tensors if t["shape"][:1] not in ([-1], [max_batch_size])), None)
    if max_batch_size and fixed is not None:
        raise ModelConfigError(
            f"--max-batch {max_batch_size}: tensor '{fixed['name']}' has shape {fixed['shape']}, "
            "whose first dimension is fixed; export the source with an open one, or leave the flag "
            "out"
        )
    size = (MAX_BATCH_SIZE if batches else 0) if max_batch_size is None else max_batch_size
    unknown = labels.keys() - {each["name"] for each in outputs}
    if unknown:
        raise ModelConfigError(
            f"labels for '{', '.join(sorted(unknown))}': the outputs are "
            f"{', '.join(each['name'] for each in outputs)}"
        )
    place = directory / str(version)
    place.mkdir(parents=True)
    label_files = {name: _labels_name(name, labels) for name in labels}
    for name, path in labels.items():
        shutil.copyfile(path, directory / label_files[name])
    lines = [f'name: "{directory.name}"']
    lines += [f'{key}: "{value}"' for key, value in fields.items()]
    lines.append(f"max_batch_size: {size}")
    lines += [_tensor_text("input", each, size, "") for each in inputs]
    lines += [_tensor_text("output", o, size, label_files.get(o["name"], "")) for o in outputs]
    (directory / CONFIG_NAME).write_text("\n".join(lines) + f"\n{more}", encoding="utf-8")
    return place


def _tensor_text(field_name: str, tensor: TensorInfo, max_batch_size: int, labels: str) -> str:
    dims = tensor["shape"][1:] if max_batch_size else tensor["shape"]
    parts = [f'name: "{_escaped(tensor["name"])}"', f"data_type: {_config_type(tensor)}"]
    # A tensor without dimensions of its own is one of one element outside.
    parts += [f"dims: [ {', '.join(map(str, dims)) or 1} ]"]
    parts += [] if dims or not max_batch_size else ["reshape { shape: [ ] }"]
    parts += [f'label_filename: "{labels}"'] if labels else []
    return f"{field_name} [ {{ {' '.join(parts)} }} ]"


def _config_type(tensor: TensorInfo) -> str:
    if tensor["datatype"] == TEXT:
        return DataType.BYTES.config_name
    datatype = DataType.from_numpy(np.dtype(tensor["datatype"]))
    if datatype is None:
        raise ModelConfigError(
            f"tensor '{tensor['name']}' is {tensor['datatype']}, which no protocol type carries"
        )
    return datatype.config_name


def _labels_name(output: str, labels: Mapping[str, Path]) -> str:
    if len(labels) == 1:
        return "labels.txt"
    plain = "".join(c if c.isalnum() else "_" for c in output)
    return f"labels_{plain}.txt"


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _dims(tensor: Any) -> list[int]:
    return list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)


def _datatype_name(tensor: Any) -> str:
    field_type = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type
    found = DataType.from_config(field_type.values_by_number[tensor.data_type].name)
    return "" if found is None else found.value
