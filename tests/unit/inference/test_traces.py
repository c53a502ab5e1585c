"""What is traced of a request on its way to an instance and back, and of what it starts."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace
from unit.inference.ensembles import (
    TIMEOUT_S,
    Responses,
    config,
    counting,
    ensemble_config,
    models_of,
    plus,
    running,
    streaming,
    value,
)

from edge_server.backends.contract import TensorModel
from edge_server.errors import DeadlineExceeded, InternalError, InvalidRequest, NotFound
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.tracing import Sampler, TracedRequest, TraceRule
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors
    from edge_server.errors import EdgeServerError
    from edge_server.requests import Trace

QUEUED = ["REQUEST_START", "QUEUE_START"]
COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


class Traces:
    """Traces of requests, as a list of what was written."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.reported: list[TracedRequest] = []

    def of(self, model_name: str) -> Trace:
        request = TracedRequest(Sampler(TraceRule()), self._ids, self.reported.append)
        trace = request.trace(model_name, "")
        assert trace is not None
        return trace

    def request(self, model_name: str, tensor: Tensor | None = None) -> InferRequest:
        return InferRequest(
            model_name, {"a": tensor or value(1, 2)}, id="7", trace=self.of(model_name)
        )

    def names(self) -> dict[str, list[str]]:
        """The names of the moments of each model of the one that was reported of."""
        (request,) = self.reported
        elements: list[dict[str, Any]] = json.loads(b"[" + request.written() + b"]")
        models = {each["id"]: each["model_name"] for each in elements if "model_name" in each}
        return {
            models[each["id"]]: [moment["name"] for moment in each["timestamps"]]
            for each in elements
            if "timestamps" in each
        }

    def parents(self) -> dict[str, str]:
        """The model that asked, by the one that was asked."""
        (request,) = self.reported
        elements: list[dict[str, Any]] = json.loads(b"[" + request.written() + b"]")
        models = {each["id"]: each["model_name"] for each in elements if "model_name" in each}
        return {
            each["model_name"]: models[each["parent_id"]]
            for each in elements
            if "parent_id" in each
        }


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.mark.parametrize("extra", ["", "dynamic_batching { } max_batch_size: 4"])
def test_a_request_is_queued_computed_and_responded_to(traces: Traces, extra: str) -> None:
    entry = running("m", plus(1), extra=extra)
    snapshot = Snapshot({("m", 1): entry})
    tensor = Tensor(np.ones((1, 2), np.float32)) if extra else value(1, 2)
    snapshot.infer(traces.request("m", tensor))
    assert traces.names() == {"m": [*QUEUED, *COMPUTED, "INFER_RESPONSE_COMPLETE", "REQUEST_END"]}
    assert entry.loaded is not None
    entry.loaded.close()


@pytest.mark.parametrize("error", [InternalError, InvalidRequest])
def test_one_that_fails_is_traced_to_its_end(traces: Traces, error: type[EdgeServerError]) -> None:
    def fail(*_: object) -> Any:
        raise error("broken")

    with pytest.raises(error):
        Snapshot({("m", 1): running("m", fail)}).infer(traces.request("m"))
    assert traces.names()["m"][-2:] == ["INFER_RESPONSE_COMPLETE", "REQUEST_END"]


def test_one_whose_caller_leaves_early_is_traced_to_the_end_of_its_run(traces: Traces) -> None:
    began, end = threading.Event(), threading.Event()

    def slow(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        began.set()
        assert end.wait(TIMEOUT_S)
        return plus(1)(inputs, outputs)

    entry = running("m", slow, extra="dynamic_batching { } max_batch_size: 4")
    snapshot = Snapshot({("m", 1): entry})
    request = traces.request("m", Tensor(np.ones((1, 2), np.float32)))
    with pytest.raises(DeadlineExceeded):
        snapshot.infer(replace(request, deadline=time.monotonic() + 1.0))
    assert began.is_set()
    assert traces.reported == []
    end.set()
    assert entry.loaded is not None
    entry.loaded.close()
    assert traces.names() == {"m": [*QUEUED, *COMPUTED, "INFER_RESPONSE_COMPLETE", "REQUEST_END"]}


def test_one_that_no_model_was_found_for_is_not_traced(traces: Traces) -> None:
    with pytest.raises(NotFound):
        Snapshot({}).infer(traces.request("m"))
    assert traces.reported == []


def test_one_that_its_scheduler_does_not_take_is_over(traces: Traces) -> None:
    text = "sequence_batching { } max_batch_size: 2"
    loaded = Scheduling().model(config("m", "a", "b", text), 1, TensorModel(plus(1)))
    snapshot = Snapshot({("m", 1): ModelEntry("m", 1, ModelState.READY, loaded=loaded)})
    with pytest.raises(InvalidRequest, match="must specify a non-zero or non-empty correlation ID"):
        snapshot.infer(traces.request("m", Tensor(np.ones((1, 2), np.float32))))
    assert traces.names() == {"m": [*QUEUED, "REQUEST_END"]}
    loaded.close()


def test_members_of_an_ensemble_have_traces_of_their_own(traces: Traces) -> None:
    inner = ensemble_config("inner", "a", "b", "one a=a > b=b")
    outer = ensemble_config("outer", "a", "c", "inner a=a > b=mid", "two a=mid > b=c")
    made = models_of(inner, running("one", plus(1)), running("two", plus(2)))
    made = type(made)((inner, outer), (made.entries["one"], made.entries["two"]), made.threads)
    made.snapshot.infer(traces.request("outer"))
    ended = ["INFER_RESPONSE_COMPLETE", "REQUEST_END"]
    assert traces.names() == {
        "outer": ["REQUEST_START", *ended],
        "inner": ["REQUEST_START", "REQUEST_END"],
        "one": [*QUEUED, *COMPUTED, "REQUEST_END"],
        "two": [*QUEUED, *COMPUTED, "REQUEST_END"],
    }
    assert traces.parents() == {"inner": "outer", "one": "inner", "two": "outer"}


def test_every_step_behind_a_decoupled_member_is_traced(traces: Traces) -> None:
    ensemble = ensemble_config("e", "a", "c", "many a=a > b=mid", "one a=mid > b=c")
    made = models_of(ensemble, streaming("many", counting(3)), running("one", plus(1)))
    responses = Responses()
    made.snapshot.submit(traces.request("e"), responses)
    assert len(responses.wait()) == 3
    (request,) = traces.reported
    assert len(request) == 1 + 1 + 3
