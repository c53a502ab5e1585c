"""A model that adds up its sequences, and callers that send them, for tests."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from support.model_configs import config_of
from support.waiting import TIMEOUT_S

from edge_server.backends.contract import TensorInstance, TensorModel
from edge_server.errors import InternalError
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.requests import InferRequest, InferResponse, Reply, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from support.callers import Caller

    from edge_server.backends.contract import Tensors
    from edge_server.inference.registry import LoadedModel
    from edge_server.model_config.config import ModelConfig, Placement

A_MINUTE = "max_sequence_idle_microseconds: 60000000"
STATE = 'state { input_name: "sum_in" output_name: "sum_out" data_type: TYPE_FP32 dims: -1 }'


class Accumulate:
    """The model; it records the inputs of each run, and runs only while it is `allowed`."""

    def __init__(self) -> None:
        self.batches: list[Tensors] = []
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Event()
        self.allowed.set()

    def __call__(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.batches.append(inputs)
        self.entered.release()
        assert self.allowed.wait(TIMEOUT_S)
        if (inputs["x"].array == 666).any():
            raise InternalError("no such road")
        made = Tensor(inputs["sum_in"].array + inputs["x"].array)
        return dict.fromkeys(outputs, made)

    def rows(self, name: str) -> list[list[float]]:
        """What `name` held in each run, by row."""
        return [inputs[name].array.ravel().tolist() for inputs in self.batches]


class SentRequest:
    """A request on its way."""

    def __init__(self, snapshot: Snapshot, request: InferRequest) -> None:
        self._pending: Reply[InferResponse] = Reply()
        snapshot.submit(request, self._pending)

    def outputs(self, timeout_s: float = TIMEOUT_S) -> dict[str, list[float]]:
        waiter = InferRequest("m", {}, deadline=time.monotonic() + timeout_s)
        outputs = self._pending.wait(waiter).outputs
        return {name: tensor.array.ravel().tolist() for name, tensor in outputs.items()}

    def value(self) -> float:
        ((value,),) = self.outputs().values()
        return value


class Road:
    """One model with callers."""

    def __init__(self, loaded: LoadedModel, model: Accumulate) -> None:
        self.loaded = loaded
        self.scheduler = loaded.scheduler
        self.model = model
        self.snapshot = Snapshot({("m", 1): ModelEntry("m", 1, ModelState.READY, loaded=loaded)})
        self._batched = loaded.config.max_batch_size > 0

    def send(
        self,
        corrid: int | str,
        *x: float,
        start: bool = False,
        end: bool = False,
        deadline: float | None = None,
        timeout_us: int = 0,
        caller: Caller | None = None,
    ) -> SentRequest:
        values = np.array([x] if self._batched else x, np.float32)
        request = InferRequest(
            "m",
            {"x": Tensor(values)},
            sequence=SequencePlace(corrid, start, end),
            deadline=deadline,
            timeout_us=timeout_us,
            cancellation=caller,
        )
        return SentRequest(self.snapshot, request)

    def hold(self, corrid: int, x: float = 0.0, *, end: bool = False) -> SentRequest:
        """Let the model run the first request of a sequence, until `allowed` is set."""
        self.model.allowed.clear()
        sent = self.send(corrid, x, start=True, end=end)
        assert self.model.entered.acquire(timeout=TIMEOUT_S)
        return sent


def model_config(batching: str, max_batch_size: int, extra: str = "") -> ModelConfig:
    text = (
        f'name: "m" backend: "identity" max_batch_size: {max_batch_size} '
        'instance_group { name: "m" count: 1 } '
        'input { name: "x" data_type: TYPE_FP32 dims: -1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: -1 } '
        f"sequence_batching {{ {STATE} {batching} }} {extra}"
    )
    return config_of(text)


class Closes(TensorModel):
    """Notes when its instances are closed, and that it is closed after them."""

    def __init__(self, run: Accumulate) -> None:
        super().__init__(run)
        self.closed: list[str] = []

    def make_instance(self, name: str, placement: Placement) -> TensorInstance:
        closed = self.closed

        class Noting(TensorInstance):
            def close(self) -> None:
                closed.append(name)

        return Noting(self._run)

    def close(self) -> None:
        self.closed.append("model")
