"""Sequences that end early: cancelled, too late, failed, idle, or with their model."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.callers import Caller
from unit.inference.sequences import (
    A_MINUTE,
    TIMEOUT_S,
    Accumulate,
    Closes,
    Road,
    model_config,
)

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.requests import ResponseCallback


def test_a_cancelled_request_does_not_run_and_ends_its_sequence(
    road: Callable[..., Road],
) -> None:
    m = road(max_batch_size=1)
    first, caller = m.hold(1, 1), Caller()
    cancelled, behind = m.send(1, 2, caller=caller), m.send(1, 3)
    other = m.send(2, 9, start=True)
    caller.cancelled = True
    m.model.allowed.set()
    assert first.value() == 1
    with pytest.raises(Cancelled, match=r"^$"):
        cancelled.value()
    with pytest.raises(Cancelled, match="sequence 1 has ended: another request of it"):
        behind.value()
    assert other.value() == 9
    assert m.model.rows("x") == [[1], [9]]
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        m.send(1, 4)


def test_a_sequence_that_waits_for_a_slot_ends_with_any_of_its_requests(
    road: Callable[..., Road],
) -> None:
    m = road(max_batch_size=1)
    first, caller = m.hold(1, 1), Caller()
    before = m.send(2, 2, start=True)
    cancelled, behind = m.send(2, 3, caller=caller), m.send(2, 4, end=True)
    caller.cancelled = True
    for each in (before, behind):
        with pytest.raises(Cancelled, match="sequence 2 has ended"):
            each.value()
    with pytest.raises(Cancelled, match=r"^$"):
        cancelled.value()
    m.model.allowed.set()
    assert first.value() == 1


def test_a_sequence_that_waits_for_a_slot_runs_although_the_one_after_it_is_cancelled(
    road: Callable[..., Road],
) -> None:
    m = road(max_batch_size=1)
    first, caller = m.hold(1, 1, end=True), Caller()
    before = m.send(2, 2, start=True)
    anew, cancelled = m.send(2, 3, start=True), m.send(2, 4, caller=caller)
    caller.cancelled = True
    with pytest.raises(Cancelled, match=r"^$"):
        cancelled.value()
    with pytest.raises(Cancelled, match="sequence 2 has ended"):
        anew.value()
    m.model.allowed.set()
    assert [first.value(), before.value()] == [1, 2]


def test_an_end_that_comes_too_late_still_frees_the_slot(road: Callable[..., Road]) -> None:
    m = road(max_batch_size=1)
    first = m.hold(1, 1)
    late = m.send(1, 2, end=True, deadline=time.monotonic())
    other = m.send(2, 9, start=True)
    m.model.allowed.set()
    assert first.value() == 1
    with pytest.raises(DeadlineExceeded):
        late.value()
    assert other.value() == 9


def test_sequences_that_wait_for_a_slot_leave_nothing_behind_when_their_callers_are_gone(
    road: Callable[..., Road],
) -> None:
    m = road(max_batch_size=1)
    first = m.hold(1, 1)
    callers = [Caller() for _ in range(20)]
    cancelled = [m.send(2 + i, i, start=True, caller=caller) for i, caller in enumerate(callers)]
    deadline = time.monotonic() + 0.05
    late = [m.send(100 + i, i, start=True, deadline=deadline) for i in range(20)]
    kept = m.send(200, 9, start=True)
    for caller in callers:
        caller.cancelled = True
    # The only instance runs all the time: nobody but the watch over the lines sees to it.
    for each in cancelled:
        with pytest.raises(Cancelled):
            each.value()
    for each in late:
        with pytest.raises(DeadlineExceeded):
            each.value()
    assert m.scheduler.pending() == 1
    assert len(m.scheduler._book._live) == 2  # type: ignore[attr-defined]  # this scheduler has it
    m.model.allowed.set()
    assert first.value() == 1
    m.send(1, 1, end=True).value()
    assert kept.value() == 9


def test_a_dead_request_in_the_middle_ends_its_sequence_while_those_before_it_run(
    road: Callable[..., Road],
) -> None:
    m = road(max_batch_size=1)
    first, caller = m.hold(1, 1), Caller()
    second, cancelled = m.send(1, 2), m.send(1, 3, caller=caller)
    behind, anew = m.send(1, 4), m.send(1, 5, start=True)
    caller.cancelled = True
    with pytest.raises(Cancelled, match=r"^$"):
        cancelled.value()
    with pytest.raises(Cancelled, match="sequence 1 has ended"):
        behind.value()
    m.model.allowed.set()
    assert [first.value(), second.value(), anew.value()] == [1, 3, 5]


def test_the_line_for_a_slot_is_bounded(
    road: Callable[..., Road], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_server.inference.sequence.MOST_WAITING", 3)
    m = road(max_batch_size=1)
    m.hold(1, 1)
    for i in range(3):
        m.send(2 + i, 1, start=True)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        m.send(9, 1, start=True)
    m.model.allowed.set()


def test_a_batch_that_cannot_be_made_fails_its_requests_and_frees_its_sequences(
    road: Callable[..., Road], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = road()
    controls = m.scheduler._controls  # type: ignore[attr-defined]  # this scheduler has it
    with monkeypatch.context() as patch:
        patch.setattr(controls, "of", lambda place: 1 / 0)
        with pytest.raises(InternalError, match="division by zero"):
            m.send(1, 1, start=True).value()
    assert m.send(1, 1, start=True).value() == 1


def test_a_failed_request_leaves_the_state_as_it_was(road: Callable[..., Road]) -> None:
    m = road()
    assert m.send(1, 1, start=True).value() == 1
    with pytest.raises(InternalError, match="no such road"):
        m.send(1, 666).value()
    assert m.send(1, 2).value() == 3


def test_an_idle_sequence_gives_up_its_slot(road: Callable[..., Road]) -> None:
    m = road("max_sequence_idle_microseconds: 1000", max_batch_size=1)
    first, other = m.send(1, 1, start=True), m.send(2, 9, start=True)
    assert (first.value(), other.value()) == (1, 9)
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        m.send(1, 2)


def test_close_refuses_what_waits_and_closes_the_instances() -> None:
    model = Closes(Accumulate())
    loaded = Scheduling().model(model_config(A_MINUTE, 1), 1, model)
    m = Road(loaded, Accumulate())
    m.send(1, 1, start=True).value()
    waiting = m.send(2, 1, start=True)
    loaded.close()
    expected = (
        "Server is stopping, scheduler for model has stopped accepting new inference requests$"
    )
    with pytest.raises(Unavailable, match=r"^\[request id: <id_unknown>\] " + expected):
        waiting.value()
    with pytest.raises(Unavailable, match=expected):
        m.send(1, 2)
    assert model.closed == ["m_0", "model"]


def test_the_last_response_of_a_replaced_model_closes_it() -> None:
    run = Accumulate()
    run.allowed.clear()
    model = Closes(run)
    loaded = Scheduling().model(model_config(A_MINUTE, 1), 1, model)
    registry = ModelRegistry()
    registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=loaded)])
    responses: list[ResponseCallback] = []
    responded = threading.Event()

    def respond(response: ResponseCallback, final: bool) -> None:
        responses.append(response)
        responded.set()

    request = InferRequest(
        "m",
        {"x": Tensor(np.zeros((1, 1), np.float32))},
        sequence=SequencePlace(1, start=True),
    )
    DataPlane(registry).submit(request, respond)
    assert run.entered.acquire(timeout=TIMEOUT_S)
    registry.replace("m", [])
    assert model.closed == []
    run.allowed.set()
    assert responded.wait(TIMEOUT_S)
    assert registry.wait_closed(TIMEOUT_S)
    assert model.closed == ["m_0", "model"]
