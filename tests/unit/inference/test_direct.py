"""Direct scheduling runs on the caller's thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.model_configs import config_of
from support.waiting import TIMEOUT_S

from edge_server.backends.contract import TensorModel
from edge_server.errors import InternalError, Unavailable
from edge_server.inference.direct import DirectScheduler
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors
    from edge_server.model_config.config import ModelConfig, Placement


def config(name: str, inputs: str, outputs: str, extra: str = "") -> ModelConfig:
    text = f'name: "{name}" backend: "identity" instance_group {{ name: "{name}" count: 1 }}'
    for kind, names in (("input", inputs), ("output", outputs)):
        for tensor in names.split():
            text += f'{kind} {{ name: "{tensor}" data_type: TYPE_FP32 dims: -1 }}\n'
    return config_of(text + extra)


def snapshot_of(model: TensorModel) -> Snapshot:
    """Of one model, `m`: a → b."""
    loaded = Scheduling().model(config("m", "a", "b"), 1, model)
    return Snapshot({("m", 1): ModelEntry("m", 1, ModelState.READY, loaded=loaded)})


VALUE = Tensor(np.arange(3, dtype=np.float32))


def test_there_is_no_thread_hop() -> None:
    ran_on: list[int] = []

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        ran_on.append(threading.get_ident())
        return {"b": inputs["a"]}

    snapshot_of(TensorModel(run)).infer(InferRequest("m", {"a": VALUE}))
    assert ran_on == [threading.get_ident()]


def test_one_instance_runs_one_request_at_a_time() -> None:
    entered: list[threading.Event] = [threading.Event(), threading.Event()]
    release = threading.Event()
    turn = iter(entered)

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        next(turn).set()
        release.wait(TIMEOUT_S)
        return {"b": inputs["a"]}

    snapshot = snapshot_of(TensorModel(run))
    threads = [
        threading.Thread(target=snapshot.infer, args=(InferRequest("m", {"a": VALUE}),))
        for _ in entered
    ]
    for thread in threads:
        thread.start()
    assert entered[0].wait(TIMEOUT_S)
    assert not entered[1].wait(0.05)
    release.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert entered[1].is_set()


def test_a_caller_that_would_be_served_too_late_is_refused_while_the_model_runs() -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        begun.release()
        assert release.wait(TIMEOUT_S)
        return {"b": inputs["a"]}

    snapshot = snapshot_of(TensorModel(run))
    # A run takes an hour, as far as anybody knows.
    scheduler = snapshot.find("m").scheduler
    assert isinstance(scheduler, DirectScheduler)
    runs_s = scheduler._pool.expected.runs_s
    runs_s.append(3600.0)
    busy = threading.Thread(target=snapshot.infer, args=(InferRequest("m", {"a": VALUE}),))
    busy.start()
    assert begun.acquire(timeout=TIMEOUT_S)
    short_deadline = InferRequest("m", {"a": VALUE}, deadline=time.monotonic() + 1000)
    with pytest.raises(Unavailable, match="would have no response before its deadline"):
        snapshot.infer(short_deadline)
    release.set()
    busy.join(TIMEOUT_S)
    long_deadline = InferRequest("m", {"a": VALUE}, deadline=time.monotonic() + 10_000)
    assert snapshot.infer(long_deadline).outputs["b"] is VALUE
    assert len(runs_s) == 3, "each run tells how long one takes"


def test_a_failing_model_costs_its_request_and_gives_the_instance_back() -> None:
    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        raise InternalError("broken")

    snapshot = snapshot_of(TensorModel(run))
    for _ in range(3):
        with pytest.raises(InternalError, match="broken"):
            snapshot.infer(InferRequest("m", {"a": VALUE}))


def test_what_an_instance_raises_unforeseen_is_an_internal_error_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Raises:
        def execute(self, requests: object) -> None:
            raise ValueError("odd")

        def close(self) -> None: ...

    class Odd(TensorModel):
        def make_instance(self, name: str, placement: Placement) -> Raises:
            return Raises()

    snapshot = snapshot_of(Odd(lambda i, o: {}))
    with pytest.raises(InternalError, match=r"model 'm' failed: ValueError\('odd'\)"):
        snapshot.infer(InferRequest("m", {"a": VALUE}))
    assert "an instance raised" in caplog.text
