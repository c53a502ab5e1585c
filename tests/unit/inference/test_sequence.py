"""Sequences of a real little model: y = sum_out = sum_in + x, joined, kept apart, in order."""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from unit.inference.sequences import (
    A_MINUTE,
    TIMEOUT_S,
    Accumulate,
    Closes,
    Road,
    SentRequest,
    model_config,
)
from unit.inference.threads import no_more_threads

from edge_server.backends.contract import TensorInstance, TensorModel
from edge_server.errors import (
    InternalError,
    InvalidRequest,
    ModelConfigError,
    Unavailable,
)
from edge_server.inference.scheduling import Scheduling
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.model_config.config import Placement
    from edge_server.requests import ResponseCallback

CONTROLS = """
control_input { name: "start" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [-1, 1] } }
control_input { name: "end" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }
control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""


@pytest.mark.parametrize("max_batch_size", [0, 4])
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_a_state_is_carried_from_request_to_request_and_hidden(
    road: Callable[..., Road], strategy: str, max_batch_size: int
) -> None:
    m = road(f"{A_MINUTE} {strategy}", max_batch_size)
    assert m.send(7, 1, start=True).outputs() == {"y": [1]}
    assert m.send(7, 2).outputs() == {"y": [3]}
    assert m.send(7, 3, end=True).outputs() == {"y": [6]}
    assert m.send(7, 10, start=True, end=True).outputs() == {"y": [10]}


def test_requests_of_a_sequence_run_in_the_order_in_which_they_came(
    road: Callable[..., Road],
) -> None:
    m = road()
    first = m.hold(7, 1)
    others = [m.send(7, 1) for _ in range(8)]
    m.model.allowed.set()
    assert [sent.value() for sent in (first, *others)] == list(range(1, 10))


def test_sequences_share_a_batch_and_keep_their_rows_and_states(
    road: Callable[..., Road],
) -> None:
    m = road(f"{A_MINUTE} {CONTROLS}")
    sent = [m.hold(1, 1), m.send(2, 20, start=True), m.send(3, 300, start=True, end=True)]
    m.model.allowed.set()
    assert [a.value() for a in sent] == [1, 20, 300]
    assert m.model.rows("x") == [[1], [0, 20, 300]]
    assert m.model.rows("ready") == [[1], [-1, 1, 1]]
    assert m.model.rows("start") == [[1], [0, 1, 1]]
    assert m.model.rows("end") == [[0], [0, 0, 1]]
    assert m.model.rows("id") == [[1], [0, 2, 3]]
    assert (m.send(1, 1).value(), m.send(2, 2).value()) == (2, 22)


def test_padding_is_no_inference_and_no_success(road: Callable[..., Road]) -> None:
    m = road()
    sent = [m.hold(1, 1), m.send(2, 2, start=True)]
    m.model.allowed.set()
    for each in sent:
        each.value()
    counts = m.loaded.statistics.counts()
    assert (counts.execution_count, counts.inference_count, counts.success.count) == (2, 2, 2)
    assert sorted(counts.batches) == [1, 2]


def test_padding_of_a_decoupled_model_gives_no_response(
    road: Callable[..., Road], caplog: pytest.LogCaptureFixture
) -> None:
    m = road(extra="model_transaction_policy { decoupled: true }")
    sent = [m.hold(1, 1), m.send(2, 2, start=True)]
    m.model.allowed.set()
    assert [a.value() for a in sent] == [1, 2]
    assert m.loaded.statistics.counts().responses["0"].success.count == 2
    assert caplog.text == ""


def test_tensors_that_cannot_be_joined_run_one_after_the_other(
    road: Callable[..., Road],
) -> None:
    m = road()
    sent = [m.hold(1, 1), m.send(2, 1, 2, start=True), m.send(3, 3, start=True)]
    m.model.allowed.set()
    assert [a.outputs()["y"] for a in sent] == [[1], [1, 2], [3]]


def test_states_that_cannot_be_joined_run_one_after_the_other(
    road: Callable[..., Road],
) -> None:
    m = road()
    assert m.send(1, 1, 2, start=True).outputs() == {"y": [1, 2]}
    assert m.send(2, 5, start=True).outputs() == {"y": [5]}
    held = m.hold(3)
    sent = [m.send(1, 1), m.send(2, 1)]
    m.model.allowed.set()
    held.value()
    assert [a.outputs()["y"] for a in sent] == [[2, 3], [6]]


def test_sequences_beyond_the_slots_wait_whole(road: Callable[..., Road]) -> None:
    m = road(max_batch_size=1)
    first = m.hold(1, 1)
    later = [m.send(2, 5, start=True), m.send(2, 6), m.send(3, 7, start=True, end=True)]
    last = m.send(1, 2, end=True)
    m.model.allowed.set()
    assert (first.value(), last.value()) == (1, 3)
    m.send(2, 7, end=True)
    assert [a.value() for a in later] == [5, 11, 7]
    assert m.model.rows("x") == [[1], [2], [5], [6], [7], [7]]


def test_oldest_runs_one_request_of_each_sequence_at_a_time(road: Callable[..., Road]) -> None:
    m = road(f"{A_MINUTE} oldest {{ max_candidate_sequences: 8 }}", max_batch_size=2)
    first = m.hold(9)
    sent = [m.send(1, 1, start=True), m.send(1, 2), m.send(2, 10, start=True), m.send(2, 20)]
    m.model.allowed.set()
    assert first.value() == 0
    assert [a.value() for a in sent] == [1, 3, 10, 30]
    assert m.model.rows("x") == [[0], [1, 10], [2, 20]]


def test_oldest_gives_every_request_its_controls(road: Callable[..., Road]) -> None:
    m = road(f"{A_MINUTE} {CONTROLS} oldest {{ max_candidate_sequences: 8 }}")
    first = m.hold(9)
    sent = [m.send(1, 1, start=True), m.send(2, 1, start=True, end=True), m.send(9, 1)]
    m.model.allowed.set()
    for each in (first, *sent):
        each.value()
    assert m.model.rows("id")[1] == [1, 2, 9]
    assert m.model.rows("start")[1] == [1, 1, 0]
    assert m.model.rows("end")[1] == [0, 1, 0]
    assert m.model.rows("ready")[1] == [1, 1, 1]


@pytest.mark.parametrize("corrid", [0, ""])
def test_a_request_names_its_sequence(road: Callable[..., Road], corrid: int | str) -> None:
    expected = "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    with pytest.raises(InvalidRequest, match=expected):
        road().send(corrid, 1, start=True)
    with pytest.raises(InvalidRequest, match=expected):
        SentRequest(road().snapshot, InferRequest("m", {"x": Tensor(np.zeros((1, 1), np.float32))}))


def test_a_request_is_one_row(road: Callable[..., Road]) -> None:
    expected = (
        "^inference request to model 'm' must specify batch-size 1 due to requirements of "
        "sequence batcher$"
    )
    rows = {"x": Tensor(np.zeros((2, 1), np.float32))}
    with pytest.raises(InvalidRequest, match=expected):
        SentRequest(road().snapshot, InferRequest("m", rows, sequence=SequencePlace(1, start=True)))


@pytest.mark.parametrize("corrid", [5, "left"])
def test_a_sequence_begins_with_start(road: Callable[..., Road], corrid: int | str) -> None:
    expected = (
        f"^inference request for sequence {corrid} to model 'm' must specify the START flag on "
        "the first request of the sequence$"
    )
    m = road()
    with pytest.raises(InvalidRequest, match=expected):
        m.send(corrid, 1)
    assert m.send(corrid, 1, start=True, end=True).value() == 1
    with pytest.raises(InvalidRequest, match=expected):
        m.send(corrid, 1)


def test_an_id_that_the_model_cannot_take_is_refused_at_the_door(
    road: Callable[..., Road],
) -> None:
    with pytest.raises(InvalidRequest, match=r"sequence left .* an integer"):
        road(f"{A_MINUTE} {CONTROLS}").send("left", 1, start=True)


def test_a_start_on_a_live_id_begins_anew_after_what_came_before(
    road: Callable[..., Road], caplog: pytest.LogCaptureFixture
) -> None:
    m = road()
    sent = [m.hold(7, 1), m.send(7, 2)]
    assert caplog.text == ""
    sent += [m.send(7, 100, start=True), m.send(7, 1)]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "model m: sequence 7 starts again before its END" in caplog.text
    m.model.allowed.set()
    assert [a.value() for a in sent] == [1, 3, 100, 101]


def test_a_sequence_waits_for_a_slot_no_longer_than_its_timeout(
    road: Callable[..., Road],
) -> None:
    m = road(max_batch_size=1)
    m.send(1, 1, start=True).value()
    sent = [m.send(2, 1, start=True, timeout_us=1000), m.send(2, 1)]
    for each in sent:
        with pytest.raises(
            Unavailable, match=r"^timeout of the corresponding sequence has been expired$"
        ):
            # Sooner than a thread looks up of itself.
            each.outputs(timeout_s=4.0)


def test_a_direct_batch_waits_for_others_no_longer_than_its_delay(
    road: Callable[..., Road],
) -> None:
    delay = "direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 0.5 }"
    m = road(f"{A_MINUTE} {delay}")
    sent = [m.send(1, 1, start=True), m.send(2, 2, start=True)]
    assert [a.value() for a in sent] == [1, 2]
    assert m.model.rows("x") == [[1, 2]]


def test_a_delay_may_be_longer_than_any_thread_can_wait(
    road: Callable[..., Road], caplog: pytest.LogCaptureFixture
) -> None:
    forever = f"max_queue_delay_microseconds: {2**64 - 1}"
    m = road(f"{A_MINUTE} oldest {{ max_candidate_sequences: 4 {forever} }}", max_batch_size=2)
    first = m.send(1, 1, start=True)
    assert not m.model.entered.acquire(timeout=0.1)
    assert m.send(2, 2, start=True).value() == 2
    assert first.value() == 1
    assert caplog.messages == []


def test_waiting_requests_and_the_oldest_run_are_known(road: Callable[..., Road]) -> None:
    m = road()
    assert m.scheduler.running_since() == math.inf
    began = time.monotonic()
    first = m.hold(1)
    second = m.send(1, 1)
    assert m.scheduler.pending() == 1
    since = m.scheduler.running_since()
    assert began <= since <= time.monotonic()
    m.model.allowed.set()
    first.value()
    second.value()
    assert m.scheduler.pending() == 0


def test_a_callback_that_raises_stops_no_other_request(
    road: Callable[..., Road], caplog: pytest.LogCaptureFixture
) -> None:
    def raising(response: ResponseCallback, final: bool) -> None:
        raise ValueError("raising")

    m = road()
    request = InferRequest(
        "m",
        {"x": Tensor(np.ones((1, 1), np.float32))},
        sequence=SequencePlace(1, start=True),
    )
    m.snapshot.submit(request, raising)
    assert m.send(1, 1).value() == 2
    assert "model m: a response could not be given" in caplog.text


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
def test_in_a_crowd_every_sequence_adds_up(road: Callable[..., Road], strategy: str) -> None:
    m = road(f"{A_MINUTE} {strategy}", extra='instance_group { name: "n" count: 2 }')
    wrong: list[object] = []

    def drive(caller: int) -> None:
        for trip in range(5):
            corrid = 1 + caller * 100 + trip
            sent = [
                m.send(corrid, 1, start=step == 0, end=step == 7, timeout_us=int(TIMEOUT_S * 1e6))
                for step in range(8)
            ]
            sums = [a.value() for a in sent]
            if sums != list(range(1, 9)):
                wrong.append((corrid, sums))

    threads = [threading.Thread(target=drive, args=(caller,)) for caller in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert m.scheduler.pending() == 0


def test_where_the_system_gives_no_thread_nothing_is_left_open() -> None:
    model = Closes(Accumulate())
    config = model_config(A_MINUTE, 1, 'instance_group { name: "n" count: 3 }')
    with no_more_threads(after=1), pytest.raises(InternalError, match="gets no thread"):
        Scheduling().model(config, 1, model)
    assert sorted(model.closed) == ["m_0", "n_0", "n_1", "n_2"]


def test_as_many_candidates_as_can_be_written_cost_nothing(road: Callable[..., Road]) -> None:
    most = 2**31 - 1
    m = road(f"{A_MINUTE} oldest {{ max_candidate_sequences: {most} }}")
    assert [m.send(i, i, start=True).value() for i in (1, 2)] == [1, 2]
    assert m.scheduler._book._made == 2  # type: ignore[attr-defined]  # this scheduler has it


def test_a_state_that_cannot_be_read_is_refused_before_an_instance_is_made() -> None:
    class NoInstances(TensorModel):
        def make_instance(self, name: str, placement: Placement) -> TensorInstance:
            raise AssertionError("made")

    state = (
        'state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: 1 initial_state '
        '{ name: "i" data_type: TYPE_FP32 dims: 1 data_file: "gone" } }'
    )
    config = model_config(state, 1)
    with pytest.raises(ModelConfigError, match="no_such_model/initial_state/gone: cannot be read"):
        Scheduling().model(config, 1, NoInstances(Accumulate()), Path("no_such_model"))
