"""Implicit state: output tensors of one request that are inputs of the sequence's next one."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.errors import InternalError, ModelConfigError
from edge_server.model_config.files import reading
from edge_server.tensors import DataType, Tensor, element_count, shape_fits, shape_text

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.contract import Tensors
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import SequenceState

FOLDER = "initial_state"


class SequenceStates:
    """The states of a model: their values at START, and after a request.

    Args:
        directory: the model's; files of initial states are under its `initial_state/`.

    Raises:
        ModelConfigError: an initial state cannot be read or does not fit its state.
    """

    def __init__(
        self, config: ModelConfig, states: tuple[SequenceState, ...], directory: Path
    ) -> None:
        self._config = config
        self._states = states
        self.initial: Tensors = {
            state.input_name: self._batched(_initial(config, state, directory)) for state in states
        }
        self.output_names = frozenset(state.output_name for state in states)

    def after(self, made: Tensors) -> Tensors:
        """The states for the sequence's next request, from the outputs of this run.

        Raises:
            InternalError: a state is missing, or is not of the configured type and shape.
        """
        return {state.input_name: self._next(state, made) for state in self._states}

    def _next(self, state: SequenceState, made: Tensors) -> Tensor:
        where = f"model '{self._config.name}': state output '{state.output_name}'"
        tensor = made.get(state.output_name)
        if tensor is None:
            raise InternalError(f"{where} is missing; it gave: {', '.join(made)}")
        batching = self._config.max_batch_size > 0
        expected = (1, *state.shape) if batching else state.shape
        if tensor.datatype is not state.datatype or not shape_fits(tensor.shape, expected):
            raise InternalError(
                f"{where} is {tensor.datatype.value} {shape_text(tensor.shape)}, expected "
                f"{state.datatype.value} {shape_text(expected)}"
            )
        # A copy: a row of a batch would keep the whole batch alive as long as the sequence.
        return Tensor(tensor.array.copy())

    def _batched(self, array: NDArray[Any]) -> Tensor:
        return Tensor(array[np.newaxis] if self._config.max_batch_size > 0 else array)


def zeros(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of zeros; of BYTES, of empty strings."""
    if datatype is DataType.BYTES:
        return np.full(shape, b"", datatype.numpy)
    return np.zeros(shape, datatype.numpy)


def _initial(config: ModelConfig, state: SequenceState, directory: Path) -> NDArray[Any]:
    initial = state.initial
    if initial is None:
        return zeros(state.datatype, tuple(1 if size == -1 else size for size in state.shape))
    where = f"model '{config.name}': initial state of '{state.input_name}'"
    if initial.datatype is not state.datatype or not shape_fits(initial.shape, state.shape):
        raise ModelConfigError(
            f"{where} is {initial.datatype.config_name} {shape_text(initial.shape)}, which is no "
            f"{state.datatype.config_name} {shape_text(state.shape)}; give it the state's "
            "data_type and dims"
        )
    if -1 in initial.shape:
        raise ModelConfigError(
            f"{where} has dims {shape_text(initial.shape)}; give the size that it starts with"
        )
    if initial.file is None:
        return zeros(initial.datatype, initial.shape)
    if PurePath(initial.file).is_absolute() or ".." in PurePath(initial.file).parts:
        raise ModelConfigError(
            f"{where}: data_file '{initial.file}' leaves the folder {FOLDER} of the model; give a "
            "file in it"
        )
    path = directory / FOLDER / initial.file
    with reading(path):
        content = path.read_bytes()
    return _from_bytes(content, initial.datatype, initial.shape, path)


def _from_bytes(
    content: bytes, datatype: DataType, shape: tuple[int, ...], path: Path
) -> NDArray[Any]:
    """Raw little-endian elements in C order; of BYTES, each behind its length in 4 bytes."""
    count = element_count(shape)
    if datatype is DataType.BYTES:
        texts = _texts(content, path)
        if len(texts) != count:
            raise ModelConfigError(f"{path}: holds {len(texts)} strings, the state has {count}")
        return np.array(texts, datatype.numpy).reshape(shape)
    expected = count * datatype.numpy.itemsize
    if len(content) != expected:
        raise ModelConfigError(
            f"{path}: holds {len(content)} bytes, {datatype.config_name} {shape_text(shape)} "
            f"needs {expected}"
        )
    return np.frombuffer(content, datatype.numpy).reshape(shape)


def _texts(content: bytes, path: Path) -> list[bytes]:
    texts: list[bytes] = []
    at = 0
    while at < len(content):
        begin = at + 4
        at = begin + int.from_bytes(content[at:begin], "little")
        if at > len(content):
            raise ModelConfigError(f"{path}: ends within a string; export it again")
        texts.append(content[begin:at])
    return texts
