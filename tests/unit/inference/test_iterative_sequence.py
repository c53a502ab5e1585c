"""A request of an iterative sequence runs until its model is through with it, whatever happens in
between."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.callers import Caller
from support.model_configs import config_of
from support.waiting import TIMEOUT_S

from edge_server.backends.contract import ExecuteRequest, TensorModel
from edge_server.errors import (
    Cancelled,
    EdgeServerError,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.requests import InferRequest, InferResponse, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.backends.contract import Instance, Phases
    from edge_server.inference.registry import LoadedModel
    from edge_server.model_config.config import Placement
    from edge_server.requests import ResponseCallback

CONFIG = """
name: "m" backend: "python" max_batch_size: 4 instance_group { name: "m" count: 1 }
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
sequence_batching { iterative_sequence: true max_sequence_idle_microseconds: 60000000 %s }
%s
"""
OLDEST = "oldest { max_candidate_sequences: 4 }"
DECOUPLED = "model_transaction_policy { decoupled: true }"


class Repeats(TensorModel):
    """Runs a request as often as its `x` says, and responds with the number of runs.

    Attributes:
        batches: for each run, the ids of its requests.
        places: for each run of the first request, its place in the sequence.
        forgotten: ids of the requests that were to run again and did not.
        entered: released at the begin of each run.
        allowed: a run begins while it is set.
    """

    def __init__(self) -> None:
        super().__init__(lambda inputs, outputs: inputs)
        self.batches: list[list[str]] = []
        self.places: list[SequencePlace | None] = []
        self.forgotten: list[str] = []
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Event()
        self.allowed.set()
        self._runs: dict[str, int] = {}

    def make_instance(self, name: str, placement: Placement) -> Instance:
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        self.batches.append([each.request.id for each in requests])
        self.places.append(requests[0].request.sequence)
        self.entered.release()
        assert self.allowed.wait(TIMEOUT_S)
        for each in requests:
            name = each.request.id
            runs = self._runs[name] = self._runs.get(name, 0) + 1
            made = {"y": Tensor(np.float32([[runs]]))}
            if runs < each.inputs["x"].array.item():
                assert each.reschedule is not None
                each.reschedule(lambda name=name: self.forgotten.append(name))
                self.between(each, made)
            else:
                each.respond(made, True)
        return None

    def between(self, request: ExecuteRequest, made: dict[str, Tensor]) -> None:
        """What a request gets before its last run: nothing."""


class Streams(Repeats):
    def between(self, request: ExecuteRequest, made: dict[str, Tensor]) -> None:
        request.respond(made, False)


class Fails(Repeats):
    def between(self, request: ExecuteRequest, made: dict[str, Tensor]) -> None:
        request.respond(InternalError("its process is gone"), True)


class Sent:
    """The responses to one request."""

    def __init__(self, snapshot: Snapshot, request: InferRequest) -> None:
        self.responses: list[ResponseCallback] = []
        self._over: Future[None] = Future()
        snapshot.submit(request, self._respond)

    def _respond(self, response: ResponseCallback, final: bool) -> None:
        self.responses.append(response)
        if final:
            self._over.set_result(None)

    def values(self) -> list[float]:
        self._over.result(TIMEOUT_S)
        for each in self.responses:
            if isinstance(each, EdgeServerError):
                raise each
        return [
            each.outputs["y"].array.item()
            for each in self.responses
            if isinstance(each, InferResponse)
        ]


class Server:
    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        entry = ModelEntry("m", 1, ModelState.READY, loaded=loaded)
        self._snapshot = Snapshot({("m", 1): entry})

    def send(self, name: str, runs: int, **more: Any) -> Sent:
        inputs = {"x": Tensor(np.float32([[runs]]))}
        return Sent(self._snapshot, InferRequest("m", inputs, id=name, **more))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(model: Repeats, strategy: str = "", extra: str = "") -> Server:
        text = CONFIG % (strategy, extra)
        config = config_of(text)
        made.append(Server(Scheduling().model(config, 1, model)))
        return made[-1]

    yield make
    for each in made:
        each.loaded.close()


@pytest.mark.parametrize("strategy", ["", OLDEST])
def test_a_request_without_an_id_is_a_sequence_that_its_model_ends(
    serve: Callable[..., Server], strategy: str
) -> None:
    model = Repeats()
    server = serve(model, strategy)
    assert server.send("a", 3).values() == [3]
    first, *later = model.places
    assert first is not None
    assert first.start
    assert later == [SequencePlace(first.id), SequencePlace(first.id)]
    counts = server.loaded.statistics.counts()
    assert (counts.success.count, counts.execution_count) == (1, 3)
    assert server.loaded.scheduler.pending() == 0


def test_the_slot_of_a_request_is_free_once_it_is_over(serve: Callable[..., Server]) -> None:
    server = serve(Repeats())
    for _ in range(3):
        sent = [server.send(f"{n}", 2) for n in range(6)]
        assert all(each.values() for each in sent)
        assert server.send("own", 1, sequence=SequencePlace(5, start=True)).values()


def test_requests_that_run_again_share_batches_and_later_ones_join_them(
    serve: Callable[..., Server],
) -> None:
    model = Repeats()
    server = serve(model, OLDEST)
    model.allowed.clear()
    one = server.send("one", 3)
    assert model.entered.acquire(timeout=TIMEOUT_S)
    two = server.send("two", 2)
    model.allowed.set()
    assert (one.values(), two.values()) == ([3], [2])
    assert model.batches == [["one"], ["two", "one"], ["two", "one"]]


def test_every_run_of_a_decoupled_request_may_respond(serve: Callable[..., Server]) -> None:
    server = serve(Streams(), extra=DECOUPLED)
    assert server.send("a", 3).values() == [1, 2, 3]
    counts = server.loaded.statistics.counts()
    assert (counts.success.count, list(counts.responses)) == (1, ["0", "1", "2"])


@pytest.mark.parametrize("extra", ["", DECOUPLED])
def test_a_model_that_fails_between_two_runs_ends_the_request_once(
    serve: Callable[..., Server], extra: str
) -> None:
    model = Fails()
    sent = serve(model, extra=extra).send("a", 3)
    with pytest.raises(InternalError, match="its process is gone"):
        sent.values()
    assert model.batches == [["a"]]
    assert len(sent.responses) == 1


@pytest.mark.parametrize("extra", ["", DECOUPLED])
def test_a_request_that_is_cancelled_between_two_runs_is_forgotten(
    serve: Callable[..., Server], extra: str
) -> None:
    client, model = Caller(), Repeats()
    server = serve(model, extra=extra)
    model.allowed.clear()
    sent = server.send("a", 3, cancellation=client)
    assert model.entered.acquire(timeout=TIMEOUT_S)
    client.cancelled = True
    model.allowed.set()
    with pytest.raises(Cancelled):
        sent.values()
    assert server.send("b", 1).values() == [1]
    assert model.forgotten == ["a"]
    assert model.batches == [["a"], ["b"]]


class Closes(Repeats):
    """Its model is closed during the first run, as where the last lease on it ends."""

    server: Server

    def between(self, request: ExecuteRequest, made: dict[str, Tensor]) -> None:
        self.server.loaded.close()


def test_a_scheduler_that_closes_refuses_what_would_run_again(
    serve: Callable[..., Server],
) -> None:
    model = Closes()
    model.server = serve(model)
    with pytest.raises(Unavailable, match="Server is stopping"):
        model.server.send("a", 3).values()
    assert model.forgotten == ["a"]


@pytest.mark.parametrize("start", [False, True])
def test_no_client_joins_the_sequence_that_the_server_made_for_another(
    serve: Callable[..., Server], start: bool
) -> None:
    model = Repeats()
    model.allowed.clear()
    server = serve(model)
    first = server.send("a", 3)
    assert model.entered.acquire(timeout=TIMEOUT_S)
    place = model.places[0]
    assert place is not None
    own = server.send("b", 1, sequence=SequencePlace(1, start=True, end=True))
    with pytest.raises(InvalidRequest, match=f"sequence id {place.id} is that of a request"):
        server.send("c", 1, sequence=SequencePlace(place.id, start=start))
    model.allowed.set()
    assert (first.values(), own.values()) == ([3], [1])


@pytest.mark.parametrize("corrid", ["INT32", "UINT64", "STRING"])
def test_the_servers_own_ids_fit_the_models_input(
    serve: Callable[..., Server], corrid: str
) -> None:
    control = (
        'control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID '
        f"data_type: TYPE_{corrid} }} }}"
    )
    assert serve(Repeats(), control).send("a", 2).values() == [2]
