"""The cache gives again what was given for the very same question, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.inference.ensembles import config, ensemble_config, value

from edge_server.backends.contract import TensorModel, Tensors
from edge_server.errors import EdgeServerError, InternalError
from edge_server.inference.registry import LoadedModel, ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import (
    CachingScheduler,
    ResponseCache,
    Scheduling,
    key_of,
)
from edge_server.inference.statistics import ModelStatistics
from edge_server.requests import InferRequest, InferResponse, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.requests import Respond

CACHED = "response_cache { enable: true }"


class Counted:
    """A model that notes its runs and gives its inputs on, or fails."""

    def __init__(self) -> None:
        self.runs = 0
        self.error: EdgeServerError | None = None

    def __call__(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.runs += 1
        if self.error is not None:
            raise self.error
        return dict.fromkeys(outputs, inputs["a"])


def loaded(scheduling: Scheduling, run: Counted, extra: str = CACHED) -> LoadedModel:
    return scheduling.model(config("m", "a", "b c", extra), 1, TensorModel(run))


def asked(model: LoadedModel, *numbers: float, **more: object) -> InferResponse:
    snapshot = Snapshot({("m", 1): ModelEntry("m", 1, ModelState.READY, loaded=model)})
    return snapshot.infer(InferRequest("m", {"a": value(*numbers)}, **more))


def test_the_same_question_runs_the_model_once_and_is_counted_as_a_hit() -> None:
    run = Counted()
    model = loaded(Scheduling(cache_bytes=10_000), run)
    first, second = asked(model, 1, 2, id="1"), asked(model, 1, 2, id="2")
    assert run.runs == 1
    assert second.id == "2"
    assert second.outputs["b"].array.tolist() == first.outputs["b"].array.tolist()
    counts = model.statistics.counts()
    assert (counts.cache_hit.count, counts.cache_miss.count) == (1, 1)
    assert (counts.success.count, counts.queue.count) == (2, 2)
    assert counts.compute_infer.count == counts.success.count - counts.cache_hit.count
    assert (counts.inference_count, counts.execution_count) == (1, 1)


def test_outputs_come_in_the_order_of_each_request() -> None:
    model = loaded(Scheduling(cache_bytes=10_000), Counted())
    asked(model, 1, outputs=("b", "c"))
    assert list(asked(model, 1, outputs=("c", "b")).outputs) == ["c", "b"]
    assert model.statistics.counts().cache_hit.count == 1


@pytest.mark.parametrize("extra", ["", CACHED])
def test_without_the_models_word_or_the_servers_room_nothing_is_kept(extra: str) -> None:
    run = Counted()
    model = loaded(Scheduling(cache_bytes=0 if extra else 10_000), run, extra)
    asked(model, 1)
    asked(model, 1)
    assert run.runs == 2
    assert model.statistics.counts().cache_miss.count == 0


def test_what_is_kept_is_no_ones_memory_but_the_caches() -> None:
    run = Counted()
    model = loaded(Scheduling(cache_bytes=10_000), run)
    given_away = value(1, 2)
    snapshot = Snapshot({("m", 1): ModelEntry("m", 1, ModelState.READY, loaded=model)})
    snapshot.infer(InferRequest("m", {"a": given_away}))
    given_away.array[:] = 7
    kept = asked(model, 1, 2).outputs["b"].array
    assert run.runs == 1
    assert kept.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        kept[:] = 0


def test_an_error_is_not_kept() -> None:
    run = Counted()
    model = loaded(Scheduling(cache_bytes=10_000), run)
    run.error = InternalError("broken")
    with pytest.raises(InternalError, match="broken"):
        asked(model, 1)
    run.error = None
    assert asked(model, 1).outputs["b"].array.tolist() == [1]


def test_a_replaced_model_never_responds_for_the_new_one_and_leaves_no_entry() -> None:
    scheduling, old, new = Scheduling(cache_bytes=10_000), Counted(), Counted()
    before = loaded(scheduling, old)
    asked(before, 1)
    after = loaded(scheduling, new)
    asked(after, 1)
    assert new.runs == 1
    cache = scheduling._cache
    assert cache is not None
    used_bytes = cache.used_bytes
    before.close()
    assert cache.used_bytes == used_bytes // 2


def response(size: int) -> InferResponse:
    return InferResponse("m", "1", "", {"b": Tensor(np.zeros(size, np.uint8))})


def test_those_that_were_not_used_for_longest_make_room() -> None:
    cache = ResponseCache(6000)
    owner = object()
    for key in (b"1", b"2", b"3"):
        cache.put(owner, key, response(1000))
    assert cache.get(owner, b"1") is not None
    cache.put(owner, b"4", response(1000))
    assert [cache.get(owner, key) is None for key in (b"1", b"2", b"3", b"4")] == [
        False,
        True,
        False,
        False,
    ]


def test_a_response_larger_than_the_cache_drops_nothing() -> None:
    cache = ResponseCache(3000)
    owner = object()
    cache.put(owner, b"1", response(1000))
    cache.put(owner, b"2", response(5000))
    assert cache.get(owner, b"1") is not None
    assert cache.get(owner, b"2") is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1500)), max_size=30))
def test_the_cache_never_holds_more_than_its_size(puts: list[tuple[int, int]]) -> None:
    cache = ResponseCache(4000)
    owner = object()
    for key, size in puts:
        cache.put(owner, bytes([key]), response(size))
        assert cache.used_bytes <= 4000
    cache.forget(owner)
    assert cache.used_bytes == 0


def texts(*elements: bytes, shape: tuple[int, ...] = (-1,)) -> Tensor:
    return Tensor(np.array(elements, np.object_).reshape(shape))


def test_every_difference_of_a_question_is_a_difference_of_its_key() -> None:
    one = Tensor(np.array([1], np.int32))
    requests = [
        InferRequest("m", {"a": one}),
        InferRequest("m", {"b": one}),
        InferRequest("m", {"a": one, "b": one}),
        InferRequest("m", {"a": Tensor(np.array([1], np.uint32))}),
        InferRequest("m", {"a": Tensor(np.array([[1]], np.int32))}),
        InferRequest("m", {"a": Tensor(np.array([2], np.int32))}),
        InferRequest("m", {"a": Tensor(np.array(1, np.int32))}),
        InferRequest("m", {"a": Tensor(np.zeros((0, 2), np.int32))}),
        InferRequest("m", {"a": Tensor(np.zeros((2, 0), np.int32))}),
        InferRequest("m", {"a": texts(b"ab", b"c")}),
        InferRequest("m", {"a": texts(b"a", b"bc")}),
        InferRequest("m", {"a": texts(b"abc", b"")}),
        InferRequest("m", {"a": texts(b"ab", b"c", shape=(2, 1))}),
        InferRequest("m", {"a": one}, parameters={"k": 1}),
        InferRequest("m", {"a": one}, parameters={"k": "1"}),
    ]
    keys = {key_of(request, ("y",)) for request in requests} | {key_of(requests[0], ("z",))}
    assert len(keys) == len(requests) + 1


def test_the_order_of_names_and_the_caller_make_no_difference() -> None:
    one, two = value(1), value(2)
    a = InferRequest("m", {"a": one, "b": two}, id="1", priority=1)
    b = InferRequest("m", {"b": two, "a": one}, id="2", deadline=1.0)
    assert key_of(a, ("y", "z")) == key_of(b, ("z", "y"))


def test_an_ensembles_responses_are_cached_like_any_models() -> None:
    run, scheduling = Counted(), Scheduling(cache_bytes=10_000)
    member = loaded(scheduling, run, "")
    ensemble = scheduling.ensemble(ensemble_config("e", "x", "y", "m a=x > b=y", extra=CACHED), 1)
    snapshot = Snapshot(
        {
            (name, 1): ModelEntry(name, 1, ModelState.READY, loaded=model)
            for name, model in (("m", member), ("e", ensemble))
        }
    )
    for _ in range(2):
        snapshot.infer(InferRequest("e", {"x": value(1)}))
    assert run.runs == 1
    assert ensemble.statistics.counts().cache_hit.count == 1


def test_a_request_of_a_sequence_runs_whatever_is_kept() -> None:
    run, scheduling = Counted(), Scheduling(cache_bytes=10_000)
    ensemble = scheduling.ensemble(ensemble_config("e", "x", "y", "m a=x > b=y", extra=CACHED), 1)
    models = (("m", loaded(scheduling, run, "")), ("e", ensemble))
    snapshot = Snapshot(
        {(name, 1): ModelEntry(name, 1, ModelState.READY, loaded=model) for name, model in models}
    )
    places = [
        snapshot.infer(InferRequest("e", {"x": value(1)}, sequence=SequencePlace(number)))
        for number in (1, 2)
    ]
    # A member may keep a state for each sequence.
    assert run.runs == 2
    assert [each.parameters["sequence_id"] for each in places] == [1, 2]


def test_a_response_that_leaves_an_output_out_is_kept_as_it_is() -> None:
    class Partial:
        def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
            respond(InferResponse("m", "1", request.id, {"b": value(1)}), True)

        def pending(self) -> int:
            return 0

        def running_since(self) -> float:
            return 7.0

        def close(self) -> None: ...

    configured = config("m", "a", "b c", CACHED)
    statistics = ModelStatistics()
    scheduler = CachingScheduler(Partial(), ResponseCache(10_000), configured, statistics)
    model = LoadedModel(configured, 1, scheduler, statistics)
    assert [list(asked(model, 1).outputs) for _ in range(2)] == [["b"], ["b"]]
    assert statistics.counts().cache_hit.count == 1


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        (CACHED, "field 'response_cache' has no effect here: the server runs without --cache"),
        (
            'instance_group { count: 1 rate_limiter { resources { name: "R" count: 1 } } }',
            "field 'rate_limiter' has no effect here: the server runs without --rate-limit",
        ),
    ],
)
def test_a_cache_that_is_off_is_logged(
    extra: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(Scheduling(), Counted(), extra).close()
    assert remedy in caplog.text
