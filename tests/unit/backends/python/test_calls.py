"""Which models a model may call, the results of its loads, and the threads of its calls."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import text_format
from support.callers import Caller
from support.waiting import TIMEOUT_S, wait_until
from tritonclient.grpc import model_config_pb2 as pb
from unit.inference.threads import no_more_threads

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.python.calls import (
    ModelCalls,
    NestedCallCancellation,
    NestedCallThreads,
)
from edge_server.backends.python.context import ModelContext, PythonParameters
from edge_server.backends.python.messages import (
    CallModel,
    ChildRequest,
    IsModelReady,
    LoadModel,
    MakeFamily,
    MakeMetric,
    Query,
    QueryResult,
    Question,
    ReadMetric,
    TensorPlace,
    UnloadModel,
)
from edge_server.errors import EdgeServerError, InternalError, Unavailable
from edge_server.model_config.config import ModelConfig
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edge_server.requests import Respond

CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "python"', pb.ModelConfig()))


class Models:
    """A resolver in which these are ready."""

    def __init__(self, *ready: str) -> None:
        self.ready = set(ready)

    def submit(self, request: InferRequest, respond: Respond) -> None:
        raise NotImplementedError

    def model_ready(self, name: str, version: str) -> bool:
        return name in self.ready


class Server:
    """A server in which `b` serves now, and whose loads end as the test sets."""

    def __init__(self) -> None:
        self.models = Models("b")
        self.calls: list[object] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        self.calls.append((name, config, dict(files), within))
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        self.models.ready.add(name)

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.calls.append((name, unload_dependents))
        self.models.ready.discard(name)


class Process:
    """What `ModelCalls` needs of one: it receives, and its memory holds `stored`."""

    stored = b"0123456789"
    size_bytes = 10

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[QueryResult] = queue.SimpleQueue()
        self.channel = self.inbox = self

    def send(self, message: QueryResult) -> None:
        self.received.put(message)

    def view(self, offset: int, size_bytes: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.stored, np.uint8)[offset : offset + size_bytes]


class Calling:
    """The calls of a process of model `m`, of which a request runs that has pinned `old`."""

    def __init__(self) -> None:
        self.server = Server()
        self.process = Process()
        context = ModelContext(Path("/m/1"), CONFIG, PythonParameters(), self.server)
        request = InferRequest("m", {})
        self.callers = [
            ExecuteRequest({}, frozenset(), lambda *_: None, request, Models("old", "both"))
        ]
        self.running = True
        self.calls = ModelCalls("m_0", context, self.process, self._callers)

    def _callers(self) -> list[ExecuteRequest]:
        return self.callers if self.running else []

    def ready(self, name: str, *, running: bool = True) -> bool:
        return bool(self.result(IsModelReady(name, ""), running=running).value)

    def load(self, name: str, config: str = "", files: list[TensorPlace] | None = None) -> str:
        return self.result(LoadModel(name, config, files or [])).failure

    def unload(self, name: str) -> str:
        return self.result(UnloadModel(name, True)).failure

    def result(self, what: Question, *, running: bool = True) -> QueryResult:
        self.running = running
        self.calls.query(Query(1, what))
        return self.received()

    def received(self) -> QueryResult:
        return self.process.received.get(timeout=TIMEOUT_S)


@pytest.fixture
def calling() -> Iterator[Calling]:
    made = Calling()
    yield made
    made.calls.close()


def test_a_model_sees_what_its_request_has_pinned_and_beyond_it_what_serves_now(
    calling: Calling,
) -> None:
    assert calling.ready("old")
    assert calling.ready("b")
    assert not calling.ready("c")
    assert not calling.ready("old", running=False)
    assert calling.ready("b", running=False)


def test_a_call_that_fails_lets_go_of_its_tensors_at_once(
    calling: Calling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(request: InferRequest, respond: Respond) -> None:
        """As a scheduler does, whose frame holds both the request and the error."""
        error = InternalError("no")
        try:
            raise error
        except InternalError:
            respond(error, True)

    monkeypatch.setattr(calling.server.models, "submit", submit)
    array = np.zeros(3)
    held = weakref.ref(array)
    message = CallModel(ChildRequest(1, "", [], [], model_name="b"), False)
    gc.disable()
    try:
        cancellation = NestedCallCancellation(calling.callers)
        calling.calls._calls[1] = cancellation
        calling.calls._submit(message, {"x": Tensor(array)}, calling.callers, cancellation)
        del array
        assert calling.received().response.failure.text == "no"  # type: ignore[attr-defined]  # of any kind of message
        assert held() is None
    finally:
        gc.enable()


def called_for(
    calling: Calling, monkeypatch: pytest.MonkeyPatch, *callers: tuple[InferRequest, Models]
) -> tuple[InferRequest, Models]:
    """What a call to model `both` becomes that is made for these, and where it is submitted."""
    submitted: list[tuple[InferRequest, Models]] = []
    monkeypatch.setattr(
        Models, "submit", lambda models, request, _: submitted.append((request, models))
    )
    calling.callers = [
        ExecuteRequest({}, frozenset(), lambda *_: None, request, models)
        for request, models in callers
    ]
    cancellation = NestedCallCancellation(calling.callers)
    message = CallModel(ChildRequest(1, "", [], [], model_name="both"), False)
    calling.calls._submit(message, {}, calling.callers, cancellation)
    ((made, models),) = submitted
    return made, models


def test_a_call_for_several_requests_lasts_as_long_as_one_of_their_clients_waits(
    calling: Calling, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, clients = Models("both"), [Caller(), Caller()]
    hurried, patient = (
        InferRequest("m", {}, deadline=deadline, cancellation=client)
        for deadline, client in zip((1.0, 2.0), clients, strict=True)
    )
    made, _ = called_for(calling, monkeypatch, (hurried, pinned), (patient, pinned))
    assert made.deadline == 2.0
    assert made.cancellation is not None
    heard: list[str] = []
    made.cancellation.when_cancelled(lambda: heard.append("cancelled"))
    clients[0].cancel()
    assert not made.cancelled
    assert heard == []
    clients[1].cancel()
    assert made.cancelled
    assert heard == ["cancelled"]
    made, _ = called_for(calling, monkeypatch, (hurried, pinned), (InferRequest("m", {}), pinned))
    assert made.deadline is None
    assert not made.cancelled


def test_a_call_of_a_decoupled_model_uses_no_models_that_another_request_may_let_go(
    calling: Calling, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, older, newer = InferRequest("m", {}), Models("both"), Models("both")
    calling.server.models.ready.add("both")
    several = ((request, older), (request, newer))
    # A batch of a model that is not decoupled ends as a whole.
    assert called_for(calling, monkeypatch, *several)[1] is older
    message = text_format.Parse("model_transaction_policy { decoupled: true }", pb.ModelConfig())
    context = ModelContext(
        Path("/m/1"), ModelConfig.of(message), PythonParameters(), calling.server
    )
    monkeypatch.setattr(calling.calls, "_context", context)
    assert called_for(calling, monkeypatch, *several)[1] is calling.server.models
    assert called_for(calling, monkeypatch, (request, newer), (request, newer))[1] is newer


@pytest.mark.parametrize("change", ["load", "unload"])
def test_a_process_that_has_changed_the_models_sees_them_as_they_are(
    calling: Calling, change: str
) -> None:
    assert calling.ready("old")
    assert getattr(calling, change)("c") == ""
    assert not calling.ready("old")
    assert calling.ready("b")
    assert calling.ready("c") == (change == "load")


@pytest.mark.parametrize(
    ("error", "failure"),
    [(Unavailable("not allowed"), "not allowed"), (KeyError("x"), "unexpected KeyError: 'x'")],
)
def test_a_load_that_fails_returns_the_reason_and_changes_nothing(
    calling: Calling, error: Exception, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    calling.server.error = error
    assert calling.load("c") == failure
    assert calling.ready("old")
    assert bool(caplog.records) != isinstance(error, EdgeServerError)


def test_a_load_carries_configuration_files_and_the_calling_model(calling: Calling) -> None:
    place = TensorPlace("file:1/model.py", "UINT8", (3,), 2, 3)
    calling.load("b", "{}", [place])
    calling.load("b")
    calling.unload("b")
    assert calling.server.calls == [
        ("b", "{}", {"file:1/model.py": b"234"}, "m"),
        ("b", None, {}, "m"),
        ("b", True),
    ]


def test_the_loads_that_a_process_waits_for_are_named(calling: Calling) -> None:
    assert calling.calls.loading() == ""
    calling.server.go_on.clear()
    calling.calls.query(Query(1, LoadModel("c", "", [])))
    assert calling.server.begun.wait(TIMEOUT_S)
    assert calling.calls.loading() == "; it was waiting for the load of 'c'"
    calling.server.go_on.set()
    assert calling.received().failure == ""
    assert calling.calls.loading() == ""


def test_metrics_are_made_and_read_and_a_failure_is_the_models(calling: Calling) -> None:
    family = MakeFamily("frames", "seen", "counter")
    assert calling.result(family) == QueryResult(1, 0.0)
    made = calling.result(MakeMetric(family, {}, []))
    assert calling.result(ReadMetric(int(made.value))) == QueryResult(1, 0.0)
    assert "cannot be a metric's name" in calling.result(MakeFamily("a b", "", "counter")).failure
    assert calling.result(ReadMetric(7)).failure == "list index out of range"


def running(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(f"calls of {name}")]


def test_no_more_than_sixteen_wait_at_once_and_the_next_waits_for_its_turn() -> None:
    threads = NestedCallThreads("sixteen")
    go_on, done = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        go_on.wait(TIMEOUT_S)
        done.release()

    for _ in range(20):
        threads.run(work)
    assert len(running("sixteen")) == 16
    go_on.set()
    for _ in range(20):
        assert done.acquire(timeout=TIMEOUT_S)
    threads.close()


def test_what_is_too_much_is_refused_and_taken_again_later() -> None:
    threads = NestedCallThreads("m_0")
    go_on, done = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        go_on.wait(TIMEOUT_S)
        done.release()

    taken = sum(threads.run(work) for _ in range(2000))
    assert taken == 1024
    go_on.set()
    for _ in range(taken):
        assert done.acquire(timeout=TIMEOUT_S)
    wait_until(lambda: threads.run(done.release))
    assert done.acquire(timeout=TIMEOUT_S)
    threads.close()


def test_a_thread_that_cannot_be_started_is_not_counted_and_those_there_are_do_the_work() -> None:
    threads, went_on, over = NestedCallThreads("m_0"), threading.Event(), threading.Semaphore(0)
    with no_more_threads(), pytest.raises(RuntimeError):
        threads.run(over.release)
    threads.run(lambda: went_on.wait(TIMEOUT_S) and over.release())
    with no_more_threads():
        threads.run(over.release)
    went_on.set()
    for _ in range(2):
        assert over.acquire(timeout=TIMEOUT_S)
    threads.close()
