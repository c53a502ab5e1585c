"""The data plane: when the server is ready, what clients read, and which run takes long."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from support.model_configs import config_of
from unit.inference.ensembles import Queueing, queueing, value

from edge_server.backends.contract import TensorModel
from edge_server.errors import Cancelled, DeadlineExceeded, InvalidRequest, NotFound
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import (
    LoadedModel,
    ModelEntry,
    ModelRegistry,
    ModelState,
    Snapshot,
)
from edge_server.inference.statistics import ModelStatistics
from edge_server.requests import InferRequest, InferResponse, Respond, ResponseCallback

CONFIG = config_of('name: "m" backend: "identity"')


class RunsSince:
    """A scheduler that says how long its oldest run takes."""

    def __init__(self, since: float = math.inf) -> None:
        self._since = since

    def infer(self, request: InferRequest, snapshot: Snapshot) -> InferResponse:
        return InferResponse(request.model_name, "1", request.id, {})

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        respond(InferResponse(request.model_name, "1", request.id, {}), True)

    def running_since(self) -> float:
        return self._since

    def close(self) -> None: ...


def ready(name: str, version: int = 1, since: float = math.inf) -> ModelEntry:
    loaded = LoadedModel(replace(CONFIG, name=name), version, RunsSince(since), ModelStatistics())
    return ModelEntry(name, version, ModelState.READY, loaded=loaded)


@pytest.fixture
def registry() -> ModelRegistry:
    return ModelRegistry()


def test_ready_is_open_with_every_model_ready(registry: ModelRegistry) -> None:
    data_plane = DataPlane(registry)
    registry.replace("m", [ready("m")])
    assert not data_plane.server_ready()
    data_plane.open()
    assert data_plane.server_ready()
    registry.replace("n", [ModelEntry("n", 0, ModelState.LOADING)])
    assert not data_plane.server_ready()
    registry.replace("n", [ready("n")])
    data_plane.shut()
    assert not data_plane.server_ready()


@pytest.mark.parametrize(
    ("state", "reason", "is_ready"),
    [
        (ModelState.LOADING, "", False),
        (ModelState.UNAVAILABLE, "it fails", False),
        (ModelState.UNAVAILABLE, "unloaded", True),
        (ModelState.UNLOADING, "", True),
    ],
)
def test_what_was_unloaded_is_not_desired_and_lenient_readiness_counts_nothing(
    registry: ModelRegistry, state: ModelState, reason: str, is_ready: bool
) -> None:
    registry.replace("m", [ready("m"), ModelEntry("m", 2, state, reason)])
    strict, lenient = DataPlane(registry), DataPlane(registry, strict_readiness=False)
    assert not lenient.server_ready()
    for data_plane in (strict, lenient):
        data_plane.open()
    assert (strict.server_ready(), lenient.server_ready()) == (is_ready, True)


def test_a_request_after_shut_still_gets_a_response(
    registry: ModelRegistry,
) -> None:
    registry.replace("m", [ready("m")])
    data_plane = DataPlane(registry)
    data_plane.shut()
    assert data_plane.infer(InferRequest("m", {}, id="7")).id == "7"


def test_an_unknown_model_is_not_ready_which_is_no_error(registry: ModelRegistry) -> None:
    registry.replace("m", [ready("m"), ModelEntry("m", 2, ModelState.LOADING)])
    data_plane = DataPlane(registry)
    assert data_plane.model_ready("m", "")
    assert data_plane.model_ready("m", "1")
    assert not data_plane.model_ready("m", "2")
    assert not data_plane.model_ready("m", "3")
    assert not data_plane.model_ready("unknown", "")
    with pytest.raises(InvalidRequest):
        data_plane.model_ready("m", "x")


def test_metadata_names_the_ready_versions_or_the_one_that_was_requested(
    registry: ModelRegistry,
) -> None:
    registry.replace("m", [ready("m"), ready("m", 3), ModelEntry("m", 4, ModelState.LOADING)])
    data_plane = DataPlane(registry)
    assert data_plane.metadata("m", "").versions == (1, 3)
    assert data_plane.metadata("m", "1").versions == (1,)
    with pytest.raises(NotFound):
        data_plane.metadata("unknown", "")


def test_the_index_lists_all_or_only_what_is_ready(registry: ModelRegistry) -> None:
    registry.replace("m", [ready("m")])
    registry.replace("a", [ModelEntry("a", 0, ModelState.UNAVAILABLE, "why")])
    data_plane = DataPlane(registry)
    assert [entry.name for entry in data_plane.index(only_ready=False)] == ["a", "m"]
    assert [entry.name for entry in data_plane.index(only_ready=True)] == ["m"]


def test_the_oldest_run_names_its_model(registry: ModelRegistry) -> None:
    data_plane = DataPlane(registry)
    assert data_plane.oldest_run() == ("", math.inf)
    registry.replace("m", [ready("m", since=99.0)])
    registry.replace("slow", [ready("slow", since=30.0)])
    assert data_plane.oldest_run() == ("slow", 30.0)


def test_a_run_on_a_model_that_was_replaced_still_counts(registry: ModelRegistry) -> None:
    data_plane = DataPlane(registry)
    registry.replace("m", [ready("m", since=30.0)])
    request = registry.lease()
    registry.replace("m", [ready("m", version=2, since=99.0)])
    assert data_plane.oldest_run() == ("m", 30.0)
    request.release()
    assert data_plane.oldest_run() == ("m", 99.0)


class EndsRuns(TensorModel):
    """Notes before when the runs began that it is to end."""

    def __init__(self) -> None:
        super().__init__(lambda inputs, _: inputs)
        self.before: list[float] = []

    def interrupt(self, before: float) -> None:
        self.before.append(before)


def test_a_run_is_ended_where_its_model_can_and_others_go_on(registry: ModelRegistry) -> None:
    data_plane = DataPlane(registry)
    hanging, newer = EndsRuns(), EndsRuns()
    for name, since, model in (("h", 30.0, hanging), ("n", 99.0, newer)):
        entry = ready(name, since=since)
        assert entry.loaded is not None
        registry.replace(name, [replace(entry, loaded=replace(entry.loaded, model=model))])
    assert data_plane.end_runs(30.0)
    assert len(hanging.before) == 1
    assert 30.0 < hanging.before[0] < 99.0
    assert newer.before == []
    registry.replace("m", [ready("m", since=20.0)])
    assert not data_plane.end_runs(20.0)


def test_a_caller_callers_that_raises_ends_neither_the_model_nor_another_s_lease(
    registry: ModelRegistry,
) -> None:
    data_plane = DataPlane(registry)
    registry.replace("m", [ready("m")])
    lease = registry.lease()

    def raises(response: ResponseCallback, final: bool) -> None:
        raise ValueError("raises")

    data_plane.submit(InferRequest("m", {}), raises)
    registry.replace("m", [])
    assert not registry.wait_closed(0.0)
    lease.release()
    assert registry.wait_closed(30.0)


@pytest.mark.parametrize("model", ["m", "unknown"])
def test_a_request_that_brings_its_own_lease_ends_it(registry: ModelRegistry, model: str) -> None:
    data_plane = DataPlane(registry)
    registry.replace("m", [ready("m")])
    with suppress(NotFound):
        data_plane.submit(InferRequest(model, {}), lambda *_: None, data_plane.lease())
    registry.replace("m", [])
    assert registry.wait_closed(30.0)


def test_a_queued_request_keeps_its_model_open_when_its_caller_has_left_at_the_deadline(
    registry: ModelRegistry,
) -> None:
    queue = Queueing()
    registry.replace("q", [queueing("q", queue)])
    request = InferRequest("q", {"a": value(1)}, deadline=time.monotonic() + 0.3)
    with pytest.raises(DeadlineExceeded):
        DataPlane(registry).infer(request)
    registry.replace("q", [])
    assert not registry.wait_closed(0.0)
    _, respond = queue.next()
    respond(Cancelled(""), True)
    assert registry.wait_closed(30.0)
    assert queue.closed.is_set()
