"""A model is not closed while it runs, and what it responses is counted one by one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.model_configs import config_of

from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.model_config.config import Placement

TIMEOUT_S = 30.0
CONFIG = config_of("""name: "m" backend: "python" instance_group { name: "m" count: 1 }
        model_transaction_policy { decoupled: true }
        input { name: "x" data_type: TYPE_FP32 dims: 1 }
        output { name: "x" data_type: TYPE_FP32 dims: 1 }""")


class GoesOn:
    """A decoupled model, and its instance, that goes on for a while after its last response."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.inside = False
        self.closed_inside: list[bool] = []

    def make_instance(self, name: str, placement: Placement) -> GoesOn:
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        self.inside = True
        for request in requests:
            request.respond(request.inputs, True)
        assert self.go_on.wait(TIMEOUT_S)
        self.inside = False

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self.closed_inside.append(self.inside)


def test_an_instance_is_not_closed_before_it_has_returned_from_its_last_response() -> None:
    model, registry = GoesOn(), ModelRegistry()
    loaded = Scheduling().model(CONFIG, 1, model)
    registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=loaded)])
    request = InferRequest("m", {"x": Tensor(np.zeros(1, np.float32))})
    responded = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(
            DataPlane(registry).submit, request, lambda _, final: final and responded.set()
        )
        assert responded.wait(TIMEOUT_S)
        registry.replace("m", [])
        assert not registry.wait_closed(0.1)
        model.go_on.set()
        run.result(TIMEOUT_S)
    assert registry.wait_closed(TIMEOUT_S)
    assert model.closed_inside == [False, False]


class Twice:
    """A decoupled model that works, and then responses twice."""

    def make_instance(self, name: str, placement: Placement) -> Twice:
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            until_ns = time.monotonic_ns() + 5_000_000
            while time.monotonic_ns() < until_ns:
                pass
            request.respond(request.inputs, False)
            request.respond(request.inputs, True)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


def test_a_response_takes_as_long_as_it_came_after_the_one_before() -> None:
    registry = ModelRegistry()
    loaded = Scheduling().model(CONFIG, 1, Twice())
    registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=loaded)])
    request = InferRequest("m", {"x": Tensor(np.zeros(1, np.float32))})
    DataPlane(registry).submit(request, lambda _, final: None)
    counts = loaded.statistics.counts()
    assert set(counts.responses) == {"0", "1"}
    in_all_ns = sum(each.compute_infer.ns for each in counts.responses.values())
    assert in_all_ns <= counts.batches[1].compute_infer.ns
    registry.clear()


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_tensors_of_a_request_go_with_its_last_response(decoupled: bool) -> None:
    config = replace(CONFIG, decoupled=decoupled)
    model, registry = GoesOn(), ModelRegistry()
    model.go_on.set()
    loaded = Scheduling().model(config, 1, model)
    registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=loaded)])
    array = np.zeros(1, np.float32)
    held, responded = weakref.ref(array), threading.Event()
    request = InferRequest("m", {"x": Tensor(array)})
    del array
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            submit = DataPlane(registry).submit
            pool.submit(submit, request, lambda _, final: final and responded.set()).result()
            assert responded.wait(TIMEOUT_S)
        registry.replace("m", [])
        assert registry.wait_closed(TIMEOUT_S)
        del request
        assert held() is None, "it waits for the garbage collector"
    finally:
        gc.enable()
