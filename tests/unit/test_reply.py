"""A reply gives one request its responses, in full and once, and holds its lease as long."""

from __future__ import annotations

import threading
import time

import pytest
from support.callers import Caller

from edge_server.errors import Cancelled, DeadlineExceeded, InternalError
from edge_server.requests import InferRequest, InferResponse, Reply, ResponseCallback

REQUEST = InferRequest("m", {})


def response(number: int) -> InferResponse:
    return InferResponse("m", "1", str(number), {})


class Lease:
    released = 0

    def release(self) -> None:
        self.released += 1


def test_a_thread_that_waits_gets_the_response_of_another() -> None:
    reply: Reply[InferResponse] = Reply()
    threading.Thread(target=reply, args=(response(1), True)).start()
    assert reply.wait(REQUEST) is reply.only()
    assert reply.is_over(0.0)


def test_an_error_is_raised_where_the_response_is_waited_for() -> None:
    reply: Reply[InferResponse] = Reply()
    reply(InternalError("broken"), True)
    with pytest.raises(InternalError, match="broken"):
        reply.wait(REQUEST)
    with pytest.raises(InternalError, match="broken"):
        reply.only()


def test_the_end_without_a_response_is_an_error() -> None:
    reply: Reply[InferResponse] = Reply()
    reply(None, True)
    with pytest.raises(InternalError, match="model 'm' ended without a response"):
        reply.wait(REQUEST)
    with pytest.raises(InternalError, match="0 responses, not one"):
        reply.only()


def test_several_responses_are_not_one() -> None:
    reply: Reply[InferResponse] = Reply()
    reply(response(1), False)
    assert not reply.is_over(0.0)
    reply(response(2), True)
    assert reply.wait(REQUEST).id == "2"
    with pytest.raises(InternalError, match="2 responses, not one"):
        reply.only()


def test_the_wait_ends_at_the_deadline() -> None:
    reply: Reply[InferResponse] = Reply()
    with pytest.raises(DeadlineExceeded):
        reply.wait(InferRequest("m", {}, deadline=time.monotonic()))


def test_the_wait_ends_with_the_cancellation_and_the_lease_with_the_last_response() -> None:
    lease, caller = Lease(), Caller()
    reply: Reply[InferResponse] = Reply(lease)
    request = InferRequest("m", {}, cancellation=caller, deadline=time.monotonic() + 30)
    threading.Timer(0.05, caller.cancel).start()
    with pytest.raises(Cancelled):
        reply.wait(request)
    assert lease.released == 0
    reply(response(1), True)
    assert lease.released == 1


def test_the_lease_is_over_before_the_caller_has_the_last_response() -> None:
    lease = Lease()
    seen: list[tuple[ResponseCallback, bool, int]] = []
    reply: Reply[InferResponse] = Reply(
        lease, lambda response, final: seen.append((response, final, lease.released))
    )
    one = response(1)
    reply(one, False)
    reply(None, True)
    assert seen == [(one, False, 0), (None, True, 1)]


def test_what_comes_after_the_last_response_is_dropped() -> None:
    lease, seen = Lease(), list[ResponseCallback]()
    reply: Reply[InferResponse] = Reply(lease, lambda response, _: seen.append(response))
    one = response(1)
    reply(one, True)
    reply(InternalError("late"), True)
    assert seen == [one]
    assert lease.released == 1


def test_an_exception_of_the_caller_does_not_reach_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(response: ResponseCallback, final: bool) -> None:
        raise ValueError("no reader")

    lease = Lease()
    reply: Reply[InferResponse] = Reply(lease, broken)
    reply(response(1), True)
    assert lease.released == 1
    assert "a response could not be given" in caplog.text
