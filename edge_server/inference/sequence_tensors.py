"""The tensors that the sequence batcher adds to requests: control inputs and implicit state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.inference.tensor_data import first_tensor, zeros
from edge_server.model_config.files import INITIAL_STATE_DIRECTORY, reading
from edge_server.model_config.scheduling import ControlKind
from edge_server.tensors import DataType, Tensor, shape_fits, shape_text

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.contract import Tensors
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import SequenceControl, SequenceState
    from edge_server.requests import SequencePlace


class SequenceControls:
    """Makes a model's control tensors: of shape [1, 1] where it batches, [1] where it does not.

    Attributes:
        largest_id: the largest that INT64 and the model's CORRID input can hold.
    """

    def __init__(self, config: ModelConfig, controls: tuple[SequenceControl, ...]) -> None:
        self._model = config.name
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._flags = [
            (
                control.input_name,
                control.kind,
                [Tensor(np.full(self._shape, value, control.datatype.numpy)) for value in values],
            )
            for control in controls
            if (values := control.false_true) is not None
        ]
        self._ids = [control for control in controls if control.kind is ControlKind.CORRID]
        numbers = [each.datatype.numpy for each in self._ids if each.datatype is not DataType.BYTES]
        self.largest_id = min([2**63 - 1, *(int(np.iinfo(each).max) for each in numbers)])

    def check(self, sequence_id: int | str) -> None:
        """Raises: InvalidRequest: the model's CORRID input cannot hold that id."""
        for control in self._ids:
            self._id_tensor(control, sequence_id)

    def of(self, place: SequencePlace | None) -> dict[str, Tensor]:
        """The control tensors of a request; None is a row without a request: nothing starts, is
        ready or ends, and the id is 0 or empty."""
        flags = {
            ControlKind.START: place is not None and place.start,
            ControlKind.READY: place is not None,
            ControlKind.END: place is not None and place.end,
        }
        tensors = {name: values[flags[kind]] for name, kind, values in self._flags}
        for control in self._ids:
            tensors[control.input_name] = self._id_tensor(
                control, None if place is None else place.id
            )
        return tensors

    def _id_tensor(self, control: SequenceControl, sequence_id: int | str | None) -> Tensor:
        dtype = control.datatype.numpy
        if control.datatype is DataType.BYTES:
            text = "" if sequence_id is None else str(sequence_id)
            return Tensor(np.array([text.encode()], dtype).reshape(self._shape))
        number = 0 if sequence_id is None else sequence_id
        must = f"inference request for sequence {number} to model '{self._model}' must specify"
        if isinstance(number, str):
            raise InvalidRequest(
                f"{must} an integer as correlation ID: its input '{control.input_name}' takes "
                f"{control.datatype.value}"
            )
        limits = np.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            raise InvalidRequest(
                f"{must} a correlation ID that fits {control.datatype.value}, the type of its "
                f"input '{control.input_name}'"
            )
        return Tensor(np.full(self._shape, number, dtype))


class SequenceStates:
    """The states of a model: output tensors of one request that are inputs of the next one.

    Args:
        directory: the model's; files of initial states are under its `initial_state/`.

    Attributes:
        initial: the inputs at START.

    Raises:
        ModelConfigError: an initial state cannot be read or does not fit its state.
    """

    def __init__(
        self, config: ModelConfig, states: tuple[SequenceState, ...], directory: Path
    ) -> None:
        self._config = config
        self._states = states
        self._batch = (1,) if config.max_batch_size > 0 else ()
        self.initial: Tensors = {
            state.input_name: self._initial(state, directory) for state in states
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
        expected = (*self._batch, *state.shape)
        if tensor.datatype is not state.datatype or not shape_fits(tensor.shape, expected):
            raise InternalError(
                f"{where} is {tensor.datatype.value} {shape_text(tensor.shape)}, expected "
                f"{state.datatype.value} {shape_text(expected)}"
            )
        # A copy: a row of a batch would keep the whole batch alive as long as the sequence.
        return Tensor(tensor.array.copy())

    def _initial(self, state: SequenceState, directory: Path) -> Tensor:
        shape = state.initial_shape
        array = zeros(state.datatype, shape)
        if state.initial_file is not None:
            path = directory / INITIAL_STATE_DIRECTORY / state.initial_file
            with reading(path):
                raw = path.read_bytes()
            data, expected = first_tensor(raw, state.datatype, shape)
            if data is None or expected != len(raw):
                raise ModelConfigError(
                    f"{path}: holds {len(raw)} bytes, {state.datatype.config_name} "
                    f"{shape_text(shape)} needs {expected}"
                )
            array = data
        return Tensor(array.reshape((*self._batch, *shape)))
