"""One batch in execution on an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.errors import InternalError
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest, Tensors
    from edge_server.backends.tensorrt.plan_io import Shape
    from edge_server.gpu.device_array import CudaArray


class Run:
    """The requests of a batch, and their outputs.

    Attributes:
        rows: of the whole batch; 0 where the model does not batch.
        shapes: input → shape of the whole batch.
        wanted: the outputs that some request asks for.
        on_device: all requests accept them on the device.
        read: device arrays that the run reads in place.
        output_shapes: output → shape; set when it is known.
        kept: outputs that stay on the device.
        host: outputs on the host.
    """

    def __init__(self, requests: Sequence[ExecuteRequest], *, batched: bool) -> None:
        self.requests = requests
        first = requests[0].inputs
        self.rows = 0
        if batched:
            self._rows = [next(iter(r.inputs.values())).shape[0] for r in requests]
            self.rows = sum(self._rows)
        self.shapes: dict[str, Shape] = {
            name: (self.rows, *tensor.shape[1:]) if batched else tensor.shape
            for name, tensor in first.items()
        }
        self.wanted = frozenset[str]().union(*(request.outputs for request in requests))
        self.on_device = all(request.request.on_device for request in requests)
        self.read: list[CudaArray] = []
        self.output_shapes: dict[str, Shape] = {}
        self.kept: dict[str, CudaArray] = {}
        self.host: dict[str, NDArray[Any]] = {}

    def answers(self, uncounted: frozenset[str]) -> list[Tensors]:
        """Return each request's part of the outputs.

        Args:
            uncounted: outputs that reached the host without a copy.

        Raises:
            InternalError: an output has another number of rows than the batch.
        """
        made: dict[str, Any] = {**self.host, **self.kept}
        parts: list[Tensors]
        if len(self.requests) == 1:
            parts = [{name: Tensor(made[name]) for name in self.requests[0].outputs}]
        else:
            for name, array in made.items():
                if array.shape[:1] != (self.rows,):
                    raise InternalError(
                        f"output '{name}' has shape {list(array.shape)} for a batch of {self.rows}"
                    )
            ends = np.cumsum(self._rows).tolist()
            parts = [
                {name: Tensor(made[name][begin:end]) for name in request.outputs}
                for request, begin, end in zip(self.requests, [0, *ends], ends, strict=False)
            ]
        for request, part in zip(self.requests, parts, strict=True):
            for name, tensor in part.items():
                if name in self.host and name not in uncounted:
                    request.copied("to_host", tensor.array.nbytes)
        return parts
