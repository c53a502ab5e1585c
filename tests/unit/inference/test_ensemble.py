"""An ensemble runs what its outputs need, as soon as it can, and responses once or in order."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.callers import Caller
from unit.inference.ensembles import (
    TIMEOUT_S,
    Models,
    Queueing,
    Responses,
    ensemble_config,
    inferred,
    models_of,
    plus,
    queueing,
    response_to,
    running,
    streaming,
    submitted,
    value,
)

from edge_server.errors import Cancelled, DeadlineExceeded, InternalError, NotFound, Unavailable
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.line import StepThreads
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.statistics import FailureReason
from edge_server.requests import InferRequest, InferResponse, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import Run, Tensors
    from edge_server.requests import Respond

    Begin = Callable[[Models, InferRequest], Responses]

VALUE = value(0, 1, 2)


def passing_on(calls: list[tuple[str, frozenset[str]]], name: str) -> Run:
    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        calls.append((name, outputs))
        return dict.fromkeys(outputs, inputs["a"])

    return run


def two_branches(calls: list[tuple[str, frozenset[str]]]) -> Models:
    """`e`: x → left → y; x → right → z. Each member notes its calls and passes its input on."""
    return models_of(
        ensemble_config("e", "x", "y z", "left a=x > b=y", "right a=x > b=z"),
        running("left", passing_on(calls, "left"), outputs="b unwanted"),
        running("right", passing_on(calls, "right")),
        threads=StepThreads(0),
    )


def chain(length: int, run: Run) -> Models:
    steps = [f"m a=t{index} > b=t{index + 1}" for index in range(length)]
    return models_of(ensemble_config("e", "t0", f"t{length}", *steps), running("m", run))


def test_steps_hand_each_other_tensors_without_a_copy() -> None:
    response = two_branches([]).snapshot.infer(InferRequest("e", {"x": VALUE}))
    assert response.outputs["y"].array is VALUE.array
    assert [timing.model_name for timing in response.timings] == ["left", "right"]


def test_only_the_steps_that_the_wanted_outputs_need_run() -> None:
    calls: list[tuple[str, frozenset[str]]] = []
    response = two_branches(calls).snapshot.infer(InferRequest("e", {"x": VALUE}, outputs=("z",)))
    assert list(response.outputs) == ["z"]
    assert calls == [("right", frozenset({"b"}))]


def test_a_step_is_requested_only_for_outputs_that_something_reads() -> None:
    calls: list[tuple[str, frozenset[str]]] = []
    two_branches(calls).snapshot.infer(InferRequest("e", {"x": VALUE}, outputs=("y",)))
    assert calls == [("left", frozenset({"b"}))]


def test_outputs_come_in_the_order_of_the_request() -> None:
    response = two_branches([]).snapshot.infer(InferRequest("e", {"x": VALUE}, outputs=("z", "y")))
    assert list(response.outputs) == ["z", "y"]


def test_an_output_that_is_an_input_needs_no_step() -> None:
    calls: list[tuple[str, frozenset[str]]] = []
    ensemble = ensemble_config("e", "x", "x y", "m a=x > b=y")
    response = models_of(ensemble, running("m", passing_on(calls, "m"))).snapshot.infer(
        InferRequest("e", {"x": VALUE}, outputs=("x",))
    )
    assert response.outputs["x"].array is VALUE.array
    assert calls == []


def test_a_chain_runs_on_the_callers_thread_at_one_depth_however_long_it_is() -> None:
    ran_on: set[int] = set()

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        ran_on.add(threading.get_ident())
        return {"b": inputs["a"]}

    response = chain(300, run).snapshot.infer(InferRequest("e", {"t0": VALUE}))
    assert response.outputs["t300"].array is VALUE.array
    assert ran_on == {threading.get_ident()}


def test_steps_that_are_ready_together_run_side_by_side() -> None:
    together = threading.Barrier(3)

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        together.wait(TIMEOUT_S)
        return {"b": inputs["a"]}

    steps = [f"m{index} a=x > b=y{index}" for index in range(3)]
    ensemble = ensemble_config("e", "x", "y0 y1 y2", *steps)
    models = models_of(ensemble, *(running(f"m{index}", run) for index in range(3)))
    assert models.snapshot.infer(InferRequest("e", {"x": VALUE})).outputs.keys() == {
        "y0",
        "y1",
        "y2",
    }
    models.threads.close()


def test_a_member_that_queues_needs_no_thread_to_run_beside_another() -> None:
    queue, ran = Queueing(), threading.Event()

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        request, respond = queue.next()
        respond(response_to(request, b=request.inputs["a"]), True)
        ran.set()
        return {"b": inputs["a"]}

    ensemble = ensemble_config("e", "x", "y z", "runs a=x > b=y", "queues a=x > b=z")
    models = models_of(
        ensemble, running("runs", run), queueing("queues", queue), threads=StepThreads(0)
    )
    models.snapshot.infer(InferRequest("e", {"x": VALUE}))
    assert ran.is_set()


def test_a_step_that_a_response_on_another_thread_makes_ready_does_not_run_on_that_thread() -> None:
    queue, ran_on = Queueing(), list[int]()

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        ran_on.append(threading.get_ident())
        return {"b": inputs["a"]}

    ensemble = ensemble_config("e", "x", "y", "queues a=x > b=t", "runs a=t > b=y")
    models = models_of(ensemble, queueing("queues", queue), running("runs", run))
    responses = submitted(models, InferRequest("e", {"x": VALUE}))
    request, respond = queue.next()
    respond(response_to(request, b=VALUE), True)
    assert responses.numbers("y") == [[0, 1, 2]]
    assert threading.get_ident() not in ran_on
    models.threads.close()


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_nested_ensembles_end_however_few_threads_there_are(limit: int) -> None:
    inner = ensemble_config("inner", "x", "y z", "m a=x > b=y", "n a=x > b=z")
    outer = ensemble_config(
        "outer", "x", "s", "inner x=x > y=p z=q", "inner x=x > y=r z=t", "sum a=p c=q d=r e=t > b=s"
    )
    members = (
        running("m", plus(1)),
        running("n", plus(2)),
        running("sum", plus(0), "a c d e"),
    )
    models = Models((inner, outer), members, StepThreads(limit))
    responses = [Responses() for _ in range(8)]
    callers = [
        threading.Thread(
            target=models.snapshot.submit, args=(InferRequest("outer", {"x": value(index)}), each)
        )
        for index, each in enumerate(responses)
    ]
    for caller in callers:
        caller.start()
    assert [each.numbers("s") for each in responses] == [[[4 * index + 6]] for index in range(8)]
    for caller in callers:
        caller.join(TIMEOUT_S)
    models.threads.close()


def test_the_first_error_is_the_response_at_once_and_nothing_later_is_sent() -> None:
    slow, broken = Queueing(), Queueing()
    ensemble = ensemble_config("e", "x", "y z", "slow a=x > b=y", "broken a=x > b=z")
    models = models_of(ensemble, queueing("slow", slow), queueing("broken", broken))
    responses = submitted(models, InferRequest("e", {"x": VALUE}))
    _, respond = broken.next()
    respond(Unavailable("out of order"), True)
    (response,) = responses.wait()
    assert isinstance(response, Unavailable)
    request, respond = slow.next()
    respond(response_to(request, b=VALUE), True)
    assert len(responses.wait()) == 1
    assert models.statistics("e").counts().failures[FailureReason.OTHER] == 1
    assert models.statistics("e").counts().execution_count == 0


def test_a_step_that_still_runs_after_an_error_keeps_its_model_open() -> None:
    slow, broken = Queueing(), Queueing()
    ensemble = ensemble_config("e", "x", "y z", "slow a=x > b=y", "broken a=x > b=z")
    models = models_of(ensemble, queueing("slow", slow), queueing("broken", broken))
    registry, responses = ModelRegistry(), Responses()
    for entry in models.entries.values():
        registry.replace(entry.name, [entry])
    DataPlane(registry).submit(InferRequest("e", {"x": VALUE}), responses)
    registry.clear()
    _, respond = broken.next()
    respond(Unavailable("out of order"), True)
    responses.wait()
    assert not slow.closed.is_set()
    request, respond = slow.next()
    respond(response_to(request, b=VALUE), True)
    assert slow.closed.wait(TIMEOUT_S)


def test_a_member_that_is_gone_or_raises_is_an_error_response() -> None:
    models = chain(2, plus(1))
    del models.entries["m"]
    gone = Models((), tuple(models.entries.values()), models.threads)
    with pytest.raises(NotFound, match="unknown model: 'm' is not found"):
        gone.snapshot.infer(InferRequest("e", {"t0": VALUE}))


def test_what_a_scheduler_raises_unforeseen_is_an_internal_error_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def produce(request: InferRequest, respond: Respond) -> None:
        raise ValueError("odd")

    models = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), streaming("m", produce))
    with pytest.raises(InternalError, match=r"model 'm' failed: ValueError\('odd'\)"):
        models.snapshot.infer(InferRequest("e", {"x": VALUE}))
    assert "model m raised" in caplog.text


def test_a_step_without_the_output_that_others_wait_for_is_a_deadlock_in_tritons_words() -> None:
    queue = Queueing()
    models = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), queueing("m", queue))
    responses = submitted(models, InferRequest("e", {"x": VALUE}, id="7"))
    queue.next()[1](None, True)
    (response,) = responses.wait()
    assert str(response) == (
        "in ensemble 'e', [request id: 7] unexpected deadlock, at least one output is not set "
        "while no more ensemble steps can be made"
    )


def test_a_step_behind_an_output_that_was_left_out_refuses_to_run_without_that_input() -> None:
    queue = Queueing()
    ensemble = ensemble_config("e", "x", "y z", "m a=x > b=s c=z", "n a=s > b=y")
    members = (queueing("m", queue, outputs="b c"), running("n", plus(1)))
    models = models_of(ensemble, *members)
    cases = [(("z",), False), (("y",), True), ((), True)]
    for (outputs, refused), begin in itertools.product(cases, (submitted, inferred)):
        responses = begin(models, InferRequest("e", {"x": VALUE}, outputs=outputs))
        request, respond = queue.next()
        respond(response_to(request, c=VALUE), True)
        (response,) = responses.wait()
        assert ("missing required input(s) ['a']" in str(response)) is refused


def test_an_output_that_was_left_out_is_an_optional_input_left_out_behind_it() -> None:
    queue = Queueing()
    optional = 'input { name: "o" data_type: TYPE_FP32 dims: -1 optional: true }'
    members = (
        queueing("m", queue, outputs="b c"),
        running("n", plus(1), extra=optional),
        running("last", plus(1)),
    )
    chain = ("m a=x > b=s c=t", "n a=s o=t > b=y")
    # Two steps that wait for nothing: no chain.
    graph = (*chain, "last a=x > b=z")
    for steps, outputs in ((chain, "y t"), (graph, "y t z")):
        models = models_of(ensemble_config("e", "x", outputs, *steps), *members)
        for begin in (submitted, inferred):
            responses = begin(models, InferRequest("e", {"x": VALUE}))
            request, respond = queue.next()
            respond(response_to(request, b=VALUE), True)
            (response,) = responses.wait()
            assert isinstance(response, InferResponse)
            assert list(response.outputs) == [name for name in outputs.split() if name != "t"]
            assert response.outputs["y"].array.tolist() == (VALUE.array + 1).tolist()


def test_a_batch_of_1_comes_and_goes_between_models_with_and_without_batching() -> None:
    batches, plain = "max_batch_size: 8", ""
    seen: list[tuple[int, ...]] = []

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        seen.append(inputs["a"].shape)
        return dict.fromkeys(outputs, inputs["a"])

    members = (
        running("m", run, extra=batches),
        running("n", run),
        running("l", run, extra=batches),
    )
    steps = ("m a=x > b=s", "n a=s > b=t", "l a=t > b=y")
    for extra, shape in ((plain, (2,)), (batches, (1, 2))):
        models = models_of(ensemble_config("e", "x", "y", *steps, extra=extra), *members)
        given = Tensor(np.ones(shape, np.float32))
        for begin in (submitted, inferred):
            seen.clear()
            (response,) = begin(models, InferRequest("e", {"x": given})).wait()
            assert isinstance(response, InferResponse)
            assert seen == [(1, 2), (2,), (1, 2)]
            assert response.outputs["y"].shape == shape


def test_a_response_has_the_place_of_its_request_in_the_sequence() -> None:
    models = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), running("m", plus(1)))
    for place, number in ((None, 0), (SequencePlace(7, start=True), 7)):
        response = models.snapshot.infer(InferRequest("e", {"x": VALUE}, sequence=place))
        assert response.parameters == {
            "sequence_id": number,
            "sequence_start": place is not None,
            "sequence_end": False,
        }


def test_a_response_of_a_decoupled_step_without_tensors_is_no_response() -> None:
    def produce(request: InferRequest, respond: Respond) -> None:
        respond(response_to(request), False)
        respond(response_to(request, b=VALUE), False)
        respond(response_to(request), True)

    models = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), streaming("m", produce))
    responses = submitted(models, InferRequest("e", {"x": VALUE}))
    assert responses.numbers("y") == [VALUE.array.tolist()]


def test_steps_know_all_of_the_request_but_its_tensors() -> None:
    queue, caller = Queueing(), Caller()
    models = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), queueing("m", queue))
    request = InferRequest(
        "e",
        {"x": VALUE},
        id="7",
        deadline=time.monotonic() + 60,
        urgent=True,
        priority=2,
        timeout_us=5,
        sequence=SequencePlace(9, start=True),
        parameters={"k": 1},
        cancellation=caller,
    )
    submitted(models, request)
    step, _ = queue.next()
    same = ("id", "deadline", "urgent", "priority", "timeout_us", "sequence", "parameters")
    assert {n: getattr(step, n) for n in same} == {n: getattr(request, n) for n in same}
    assert step.cancellation is caller


@pytest.mark.parametrize("begin", [submitted, inferred])
def test_a_step_of_a_cancelled_request_is_not_begun(begin: Begin) -> None:
    caller, calls = Caller(), list[int]()

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        calls.append(1)
        caller.cancelled = True
        return {"b": inputs["a"]}

    responses = begin(chain(3, run), InferRequest("e", {"t0": VALUE}, cancellation=caller))
    (response,) = responses.wait()
    assert isinstance(response, Cancelled)
    assert calls == [1]


def test_in_a_chain_too_a_deadline_that_has_passed_names_the_step_that_did_not_begin() -> None:
    deadline = time.monotonic() + 0.05

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        threading.Event().wait(max(0.0, deadline - time.monotonic()))
        return {"b": inputs["a"]}

    models = chain(2, run)
    with pytest.raises(DeadlineExceeded, match="before model 'm' of ensemble 'e' began"):
        models.snapshot.infer(InferRequest("e", {"t0": VALUE}, deadline=deadline))
    counts = models.statistics("e").counts()
    assert (counts.failures[FailureReason.OTHER], counts.success.count) == (1, 0)


def test_a_deadline_that_has_passed_names_the_step_that_did_not_begin() -> None:
    queue, deadline = Queueing(), time.monotonic() + 1.0
    ensemble = ensemble_config("e", "x", "y", "q a=x > b=t", "m a=t > b=y")
    models = models_of(ensemble, queueing("q", queue), running("m", plus(0)))
    responses = submitted(models, InferRequest("e", {"x": VALUE}, deadline=deadline))
    request, respond = queue.next()
    threading.Event().wait(max(0.0, deadline - time.monotonic()))
    respond(response_to(request, b=VALUE), True)
    (response,) = responses.wait()
    assert isinstance(response, DeadlineExceeded)
    assert "before model 'm' of ensemble 'e' began" in str(response)
    models.threads.close()


def test_an_ensemble_counts_its_own_executions_and_batch_elements() -> None:
    ensemble = ensemble_config("e", "x", "y", "m a=x > b=y", extra="max_batch_size: 4")
    models = models_of(ensemble, running("m", plus(0), extra="max_batch_size: 4"))
    models.snapshot.infer(InferRequest("e", {"x": Tensor(np.zeros((3, 2), np.float32))}))
    counts = models.statistics("e").counts()
    assert (counts.inference_count, counts.execution_count) == (3, 1)
    assert (counts.success.count, counts.queue.count, counts.fail.count) == (1, 1, 0)


def test_the_ensembles_own_reshapes_lie_between_its_callers_and_its_steps() -> None:
    seen: list[tuple[int, ...]] = []

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        seen.append(inputs["a"].shape)
        return {"b": inputs["a"]}

    def tensor(kind: str, name: str, said: str) -> str:
        return f'{kind} {{ name: "{name}" data_type: TYPE_FP32 {said} }} '

    reshaped, batched = "dims: [ 4 ] reshape { shape: [ 2, 2 ] }", "max_batch_size: 4 "
    ensemble = ensemble_config(
        "e",
        "",
        "",
        "m a=x > b=y",
        extra=batched + tensor("input", "x", reshaped) + tensor("output", "y", reshaped),
    )
    square = tensor("input", "a", "dims: [ 2, 2 ]") + tensor("output", "b", "dims: [ 2, 2 ]")
    models = models_of(ensemble, running("m", run, "", "", batched + square))
    response = models.snapshot.infer(InferRequest("e", {"x": Tensor(np.zeros((3, 4), np.float32))}))
    assert seen == [(3, 2, 2)]
    assert response.outputs["y"].shape == (3, 4)


@settings(deadline=None)
@given(st.data())
def test_any_graph_gives_what_its_steps_make_in_whatever_order_they_respond(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 7))
    reads = [
        data.draw(st.lists(st.integers(0, index), min_size=1, max_size=3, unique=True))
        for index in range(count)
    ]
    queued = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    read = {tensor for each in reads for tensor in each}
    ends = [index + 1 for index in range(count) if index + 1 not in read]
    outputs = sorted({*ends, *data.draw(st.sets(st.sampled_from(range(1, count + 1))))})
    wanted = data.draw(st.lists(st.sampled_from(outputs), min_size=1, unique=True))
    queue, calls = Queueing(), list[int]()

    def step(index: int) -> Run:
        def run(inputs: Tensors, names: frozenset[str]) -> Tensors:
            calls.append(index)
            return plus(index)(inputs, names)

        return run

    letters = "acd"
    members = [
        queueing(f"m{i}", queue, " ".join(letters[: len(reads[i])]))
        if queued[i]
        else running(f"m{i}", step(i), " ".join(letters[: len(reads[i])]))
        for i in range(count)
    ]
    maps = [
        " ".join(f"{name}=t{tensor}" for name, tensor in zip(letters, each, strict=False))
        for each in reads
    ]
    steps = [f"m{i} {maps[i]} > b=t{i + 1}" for i in data.draw(st.permutations(range(count)))]
    ensemble = ensemble_config("e", "t0", " ".join(f"t{n}" for n in outputs), *steps)
    models = models_of(ensemble, *members, threads=StepThreads(data.draw(st.integers(1, 2))))
    begin = data.draw(st.sampled_from([submitted, inferred]))
    responses = begin(
        models, InferRequest("e", {"t0": value(1)}, outputs=tuple(f"t{n}" for n in wanted))
    )
    while not responses.over.is_set():
        if queue.came.acquire(timeout=0.01):
            at = data.draw(st.integers(0, len(queue.jobs) - 1))
            queue.jobs.rotate(-at)
            request, respond = queue.jobs.popleft()
            index = int(request.model_name[1:])
            respond(response_to(request, **step(index)(request.inputs, frozenset("b"))), True)
    expected = {0: 1.0}
    for index in range(count):
        expected[index + 1] = sum(expected[tensor] for tensor in reads[index]) + index
    needed = set(wanted)
    for index in reversed(range(count)):
        needed |= set(reads[index]) if index + 1 in needed else set()
    assert sorted(calls) == sorted(tensor - 1 for tensor in needed if tensor)
    (response,) = responses.wait()
    assert isinstance(response, InferResponse)
    assert {n: t.array.tolist() for n, t in response.outputs.items()} == {
        f"t{n}": [expected[n]] for n in wanted
    }
    models.threads.close()
