"""What the runner and a framework's module say to each other, in a model's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from edge_server.tensors import DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

Arrays = Mapping[str, "NDArray[Any]"]


class BadInput(ValueError):
    """A request's input is what the model cannot take; the text names it."""


@dataclass(frozen=True)
class FileSignature:
    """The tensors that a model's file declares, batch dimension included; -1 is any size."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class ModelFile:
    """A model to open.

    Attributes:
        path: its file, or the directory that its format is.
        platform: of the configuration.
        inputs, outputs: those of the configuration, in order, without the batch dimension; behind
            them what the sequence batcher adds.
        max_batch_size: 0 where the model's shapes have no batch dimension.
        parameters: of the configuration, checked.
        accelerators: those of the configuration for the processor: name → parameters.
        device: `CPU`, `GPU` (the one that the process sees), or `MODEL`, where the file decides.
        threads: how many threads an inference uses where no parameter says it.
    """

    path: Path
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    parameters: Mapping[str, str]
    accelerators: Mapping[str, Mapping[str, str]]
    device: str
    threads: int

    def full_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor as the configuration has it, batch dimension included."""
        shapes = {spec.name: spec.shape for spec in (*self.inputs, *self.outputs)}
        return (*(-1,) * (self.max_batch_size > 0), *shapes[name]) if name in shapes else None


class OpenModel(Protocol):
    """A model that can run.

    Attributes:
        signature: None where the file does not declare its tensors.
    """

    signature: FileSignature | None

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        """Return at least `outputs`; BYTES are object arrays of `bytes`, BF16 as in `DataType`.

        Raises:
            BadInput: an input does not fit.
            Exception: whatever the framework raises.
        """
        ...


def model_file(path: Path, config: Mapping[str, Any], device: str) -> ModelFile:
    """Return the file of the model with this configuration, in the form that `model.py` gets."""
    groups = config.get("instance_group", ())
    instances = sum(each["count"] * max(1, len(each.get("gpus", ()))) for each in groups)
    accelerators = config.get("optimization", {}).get("execution_accelerators") or {}
    batching = config.get("sequence_batching") or {}
    states = batching.get("state", ())
    return ModelFile(
        path,
        config["platform"],
        (
            *_specs(config["input"]),
            *(_control(each) for each in batching.get("control_input", ())),
            *_specs({**each, "name": each["input_name"]} for each in states),
        ),
        (
            *_specs(config["output"]),
            *_specs({**each, "name": each["output_name"]} for each in states),
        ),
        config["max_batch_size"],
        {key: value["string_value"] for key, value in config["parameters"].items()},
        {
            each["name"]: each.get("parameters", {})
            for each in accelerators.get("cpu_execution_accelerator", ())
        },
        device,
        # More threads than processors make every inference slower.
        max(1, len(os.sched_getaffinity(0)) // max(1, instances)),
    )


def _control(control: Mapping[str, Any]) -> TensorSpec:
    (signal,) = control["control"]
    for datatype in (DataType.INT32, DataType.FP32, DataType.BOOL):
        if signal.get(f"{datatype.value.lower()}_false_true"):
            return TensorSpec(control["name"], datatype, (1,))
    datatype = DataType.from_config(signal["data_type"]) or DataType.UINT64
    return TensorSpec(control["name"], datatype, (1,))


def _specs(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor["name"], datatype, tuple(_dims(tensor)))
        for tensor in tensors
        if (datatype := DataType.from_config(tensor["data_type"])) is not None
    )


def _dims(tensor: Mapping[str, Any]) -> list[int]:
    reshape: Mapping[str, list[int]] | None = tensor.get("reshape")
    dims: list[int] = tensor["dims"]
    return dims if reshape is None else reshape["shape"]


def enabled(text: str) -> bool:
    """Return whether the text of a parameter, which has been checked, switches something on."""
    return text.lower() in ("true", "yes", "1")
