"""Tensors that TensorRT reads or writes on the host: shape tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.tensorrt.plan_io import numpy_of
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.backends.tensorrt.plan_io import PlanIO, Shape, Shapes


class HostTensors:
    """Keeps shape tensors at fixed addresses from run to run.

    Args:
        instance: its name, for errors.
    """

    def __init__(self, io: PlanIO, instance: str) -> None:
        self._instance = instance
        self._values = {t.name: np.zeros(t.shape, numpy_of(t)) for t in io.inputs if t.holds_shape}
        self._dtypes = {t.name: numpy_of(t) for t in io.outputs if t.holds_shape}
        self._outputs: dict[str, NDArray[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._values or self._dtypes)

    @property
    def addresses(self) -> dict[str, int]:
        """The addresses of the inputs."""
        return {name: held.ctypes.data for name, held in self._values.items()}

    def read(self, request: ExecuteRequest) -> Shapes:
        """Store the shape inputs of `request`; return their values by input.

        Raises:
            InvalidRequest: an input has another number of values.
        """
        inputs = request.host_inputs() if self._values else {}
        for name, held in self._values.items():
            array = inputs[name].array
            if array.shape != held.shape:
                raise InvalidRequest(
                    f"input '{name}' of {self._instance} has shape {list(array.shape)}, the plan "
                    f"takes {list(held.shape)}"
                )
            held[...] = array
        return {name: tuple(map(int, held.flat)) for name, held in self._values.items()}

    def place(self, name: str, shape: Shape) -> int:
        """Return the address of the output for the next run."""
        held = self._outputs.get(name)
        if held is None or held.shape != shape:
            held = self._outputs[name] = np.zeros(shape, self._dtypes[name])
        address: int = held.ctypes.data
        return address

    def output(self, name: str) -> NDArray[Any]:
        """Return the shape tensor that the last run wrote."""
        copy: NDArray[Any] = self._outputs[name].copy()
        return copy

    def __contains__(self, name: str) -> bool:
        return name in self._dtypes
