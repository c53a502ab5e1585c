"""Warm-up samples: requests that a model runs before it is READY."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.files import WARMUP_DIRECTORY, outside
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edge_server.model_config.files import ModelFiles


class WarmupData(Enum):
    """The source of a warm-up input's values; the values are the configuration's names."""

    ZERO = "zero_data"
    RANDOM = "random_data"
    FILE = "input_data_file"


@dataclass(frozen=True)
class WarmupInput:
    """One input of a sample.

    Attributes:
        shape: without the batch dimension; every size is known.
        file: under the model's `warmup/`, where `data` is FILE.
    """

    datatype: DataType
    shape: tuple[int, ...]
    data: WarmupData
    file: str | None


@dataclass(frozen=True)
class Warmup:
    """One sample of `model_warmup`.

    Attributes:
        batch_size: 0 gives the inputs no batch dimension.
        count: number of runs.
    """

    name: str
    batch_size: int
    count: int
    inputs: Mapping[str, WarmupInput]


def warmups_of(message: Any) -> tuple[Warmup, ...]:
    """The `model_warmup` of a completed, valid `inference.ModelConfig`."""
    return tuple(
        Warmup(
            sample.name,
            sample.batch_size,
            sample.count or 1,
            {name: _input(tensor) for name, tensor in sample.inputs.items()},
        )
        for sample in message.model_warmup
    )


def _input(tensor: Any) -> WarmupInput:
    datatype = DataType.from_config(pb.DataType.Name(tensor.data_type))
    if datatype is None:
        raise AssertionError(f"{tensor.data_type}: validation lets no such data type through")
    data = WarmupData(tensor.WhichOneof("input_data_type"))
    file = tensor.input_data_file if data is WarmupData.FILE else None
    return WarmupInput(datatype, tuple(tensor.dims), data, file)


def warmup_faults(message: Any, files: ModelFiles) -> Iterator[str]:
    """Yield the faults of a model's samples; whether they fit its inputs shows in their runs."""
    for sample in message.model_warmup:
        of = f"in sample '{sample.name}' for {message.name}"
        for name, tensor in sorted(sample.inputs.items()):
            if any(dim < 0 for dim in tensor.dims):
                yield (
                    "warmup setting expects all variable-size dimensions are specified for input "
                    f"'{name}'; {of}"
                )
            if tensor.data_type == pb.TYPE_INVALID:
                yield f"warmup setting expects 'data_type' for input '{name}' {of}"
            choice = tensor.WhichOneof("input_data_type")
            if choice is None:
                yield (
                    f"warmup setting expects 'zero_data', 'random_data' or 'input_data_file' for "
                    f"input '{name}' {of}"
                )
            directory = files.directory / WARMUP_DIRECTORY
            if choice == "input_data_file" and outside(directory, tensor.input_data_file):
                yield (
                    f"warmup setting expects the data of input '{name}' in {directory}, where "
                    f"'{tensor.input_data_file}' is not, {of}"
                )
