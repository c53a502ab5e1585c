"""Which models a model sees, and what it hears of those that it loads."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.python.calls import ModelCalls
from edge_server.backends.python.messages import (
    AskModelReady,
    CallReturned,
    LoadModel,
    TensorPlace,
    UnloadModel,
)
from edge_server.errors import EdgeServerError, Unavailable
from edge_server.requests import InferRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edge_server.requests import Respond

PATIENCE_S = 10.0


class Models:
    """A World in which these are ready."""

    def __init__(self, *ready: str) -> None:
        self.ready = set(ready)

    def submit(self, request: InferRequest, respond: Respond) -> None:
        raise NotImplementedError

    def model_ready(self, name: str, version: str) -> bool:
        return name in self.ready


class Around:
    """Surroundings in which `b` serves now, and whose loads end as the test says."""

    def __init__(self) -> None:
        self.models = Models("b")
        self.asked: list[object] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def load(
        self, name: str, *, config: str | None, files: Mapping[str, bytes], within: str
    ) -> None:
        self.asked.append((name, config, dict(files), within))
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.models.ready.add(name)

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.asked.append((name, unload_dependents))
        self.models.ready.discard(name)


class Process:
    """What `ModelCalls` needs of one: it hears, and its memory holds `stored`."""

    stored = b"0123456789"
    size_bytes = 10

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[CallReturned] = queue.SimpleQueue()
        self.channel = self.inbox = self

    def send(self, message: CallReturned) -> None:
        self.heard.put(message)

    def view(self, offset: int, size_bytes: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.stored, np.uint8)[offset : offset + size_bytes]


class Calling:
    """The calls of a process of model `m`, of which a request runs in a world with `old`."""

    def __init__(self) -> None:
        self.around = Around()
        self.process = Process()
        self.calls = ModelCalls("m_0", "m", self.process, self.around)  # type: ignore[arg-type]
        request = InferRequest("m", {})
        self.callers = [
            ExecuteRequest({}, frozenset(), lambda *_: None, request, Models("old", "both"))
        ]

    def ready(self, name: str, *, running: bool = True) -> bool:
        self.calls.ask_ready(AskModelReady(1, name, ""), self.callers if running else [])
        return bool(self.returned().value)

    def load(self, name: str, config: str = "", files: list[TensorPlace] | None = None) -> str:
        self.calls.load(LoadModel(2, name, config, files or []))
        return self.returned().failure

    def unload(self, name: str) -> str:
        self.calls.unload(UnloadModel(3, name, True))
        return self.returned().failure

    def returned(self) -> CallReturned:
        return self.process.heard.get(timeout=PATIENCE_S)


@pytest.fixture
def calling() -> Iterator[Calling]:
    made = Calling()
    yield made
    made.calls.close()


def test_a_model_sees_the_world_of_its_request_and_beyond_it_what_serves_now(
    calling: Calling,
) -> None:
    assert calling.ready("old")
    assert calling.ready("b")
    assert not calling.ready("c")
    assert not calling.ready("old", running=False)
    assert calling.ready("b", running=False)


@pytest.mark.parametrize("change", ["load", "unload"])
def test_who_has_changed_the_models_sees_them_as_they_are(calling: Calling, change: str) -> None:
    assert calling.ready("old")
    assert getattr(calling, change)("c") == ""
    assert not calling.ready("old")
    assert calling.ready("b")
    assert calling.ready("c") == (change == "load")


@pytest.mark.parametrize(
    ("error", "says"),
    [(Unavailable("not allowed"), "not allowed"), (KeyError("x"), "unexpected KeyError: 'x'")],
)
def test_a_load_that_fails_is_told_and_changes_nothing(
    calling: Calling, error: Exception, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    calling.around.error = error
    assert calling.load("c") == says
    assert calling.ready("old")
    assert bool(caplog.records) != isinstance(error, EdgeServerError)


def test_a_load_carries_configuration_files_and_who_asks(calling: Calling) -> None:
    place = TensorPlace("file:1/model.py", "UINT8", (3,), 2, 3)
    calling.load("b", "{}", [place])
    calling.load("b")
    calling.unload("b")
    assert calling.around.asked == [
        ("b", "{}", {"file:1/model.py": b"234"}, "m"),
        ("b", None, {}, "m"),
        ("b", True),
    ]


def test_what_a_process_waits_for_can_be_told_of_it(calling: Calling) -> None:
    assert calling.calls.waits_for() == ""
    calling.around.go_on.clear()
    calling.calls.load(LoadModel(1, "c", "", []))
    assert calling.around.begun.wait(PATIENCE_S)
    assert calling.calls.waits_for() == "; it was waiting for the load of 'c'"
    calling.around.go_on.set()
    assert calling.returned().failure == ""
    assert calling.calls.waits_for() == ""
