"""Writes the directory of a converted model: config.pbtxt, a version, labels."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.convert.formats import file_in_version
from edge_server.backends.convert.steps.samples import TEXT
from edge_server.errors import ModelConfigError
from edge_server.model_config.files import CONFIG_NAME, read_labels
from edge_server.model_config.parse import read_model_config
from edge_server.repository.scan import files_in
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge_server.backends.convert.steps.samples import TensorInfo

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
        parameters: of the configuration.
    """

    path: Path
    inputs: tuple[tuple[str, str, list[int]], ...] = ()
    outputs: tuple[str, ...] = ()
    labels: Mapping[str, Path] = field(default_factory=dict)
    max_batch_size: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)


def read_source(path: Path) -> SourceModel:
    """Return the model at `path`: a file, a SavedModel, or a model's directory of a repository.

    Raises:
        ModelConfigError: its configuration is wrong, or it has no version.
    """
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
    return SourceModel(
        file_in_version(files.versions[max(files.versions)], message.default_model_filename),
        tuple((each.name, _datatype_name(each), [*batch, *_dims(each)]) for each in message.input),
        tuple(each.name for each in message.output),
        {o.name: path / o.label_filename for o in message.output if o.label_filename},
        message.max_batch_size if message.input else None,
        {name: value.string_value for name, value in message.parameters.items()},
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
) -> Path:
    """Write config.pbtxt and labels into `directory`; return the version's new directory.

    Args:
        directory: of the model, whose name it is.
        version: the version.
        fields: that name its backend.
        inputs: the result's inputs.
        outputs: the result's outputs.
        labels: output → file of its labels.
        max_batch_size: None is Triton's default where every tensor has an open first dimension.

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
    (directory / CONFIG_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
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
