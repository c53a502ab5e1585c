"""Control inputs: the model's tensors for a request's position in its sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.model_config.scheduling import ControlKind
from edge_server.requests import SequencePlace
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import SequenceControl

_NOBODY = SequencePlace(0)


class SequenceControls:
    """Makes a model's control tensors: of shape [1, 1] where it batches, [1] where it does not."""

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

    def check(self, sequence_id: int | str) -> None:
        """Raises: InvalidRequest: the model's CORRID input cannot hold that id."""
        for control in self._ids:
            self._id_tensor(control, sequence_id)

    def of(self, place: SequencePlace) -> dict[str, Tensor]:
        """The control tensors of a request."""
        return self._of(place, ready=True)

    def of_padding(self) -> dict[str, Tensor]:
        """The control tensors of a row without a request: nothing starts, is ready or ends; the
        id is 0 or empty."""
        return self._of(_NOBODY, ready=False)

    def _of(self, place: SequencePlace, *, ready: bool) -> dict[str, Tensor]:
        said = {
            ControlKind.START: place.start,
            ControlKind.READY: ready,
            ControlKind.END: place.end,
        }
        tensors = {name: values[said[kind]] for name, kind, values in self._flags}
        for control in self._ids:
            tensors[control.input_name] = self._id_tensor(control, place.id if ready else None)
        return tensors

    def _id_tensor(self, control: SequenceControl, sequence_id: int | str | None) -> Tensor:
        dtype = control.datatype.numpy
        if control.datatype is DataType.BYTES:
            text = "" if sequence_id is None else str(sequence_id)
            return Tensor(np.array([text.encode()], dtype).reshape(self._shape))
        number = 0 if sequence_id is None else sequence_id
        if isinstance(number, str):
            raise InvalidRequest(
                f"inference request for sequence {number} to model '{self._model}' must specify "
                f"an integer as correlation ID: its input '{control.input_name}' takes "
                f"{control.datatype.value}"
            )
        limits = np.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            raise InvalidRequest(
                f"inference request for sequence {number} to model '{self._model}' must specify "
                f"a correlation ID that fits {control.datatype.value}, the type of its input "
                f"'{control.input_name}'"
            )
        return Tensor(np.full(self._shape, number, dtype))
