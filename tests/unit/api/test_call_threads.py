"""Calls run on as many threads as are needed, and every one of them runs."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
from support.waiting import wait_until
from unit.inference.threads import no_more_threads

from edge_server.api.calls import CallThreads

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 30.0


@pytest.fixture
def threads() -> Iterator[CallThreads]:
    made = CallThreads(3, "test")
    yield made
    made.shutdown()


class Call:
    """Blocks its thread until it is received to go on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self.thread = ""

    def __call__(self) -> None:
        self.thread = threading.current_thread().name
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)

    def end(self) -> None:
        self.go_on.set()
        assert self.ended.wait(TIMEOUT_S)


def submit(threads: CallThreads) -> Call:
    call = Call()
    threads.submit(call).add_done_callback(lambda _: call.ended.set())
    return call


def begun(threads: CallThreads) -> Call:
    call = submit(threads)
    assert call.begun.wait(TIMEOUT_S)
    return call


def wait_idle(threads: CallThreads, count: int) -> None:
    wait_until(lambda: len(threads._idle) >= count)


def test_one_caller_after_another_needs_one_thread(threads: CallThreads) -> None:
    for _ in range(5):
        call = begun(threads)
        call.end()
        wait_idle(threads, 1)
        assert call.thread == "test_0"


def test_the_thread_that_became_idle_last_is_the_next_to_run(threads: CallThreads) -> None:
    calls = [begun(threads) for _ in range(3)]
    for count, call in enumerate((calls[0], calls[2], calls[1]), 1):
        call.end()
        wait_idle(threads, count)
    again = [begun(threads) for _ in range(3)]
    assert [call.thread for call in again] == ["test_1", "test_2", "test_0"]
    for call in again:
        call.end()


def test_what_finds_no_thread_waits_for_its_turn(threads: CallThreads) -> None:
    first = [begun(threads) for _ in range(3)]
    later = [submit(threads) for _ in range(2)]
    assert not any(call.begun.is_set() for call in later)
    first[1].end()
    assert later[0].begun.wait(TIMEOUT_S)
    assert later[0].thread == first[1].thread
    assert not later[1].begun.is_set()
    for call in (*first, *later):
        call.end()


def test_a_callback_runs_for_a_call_that_has_ended(threads: CallThreads) -> None:
    call = begun(threads)
    task = threads.submit(lambda: None)
    call.end()
    over = threading.Event()
    task.add_done_callback(lambda _: over.set())
    assert over.wait(TIMEOUT_S)


def test_a_call_that_raises_costs_no_thread(
    threads: CallThreads, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    with caplog.at_level(logging.ERROR):
        threads.submit(lambda: 1 / 0).add_done_callback(lambda _: over.set())
        assert over.wait(TIMEOUT_S)
        wait_idle(threads, 1)
    assert "ZeroDivisionError" in caplog.text
    begun(threads).end()
    assert len(threads._threads) == 1


def test_an_idle_thread_keeps_nothing_alive(threads: CallThreads) -> None:
    class Large: ...

    large = Large()
    gone = weakref.ref(large)
    threads.submit(lambda _: None, large)
    del large
    wait_idle(threads, 1)
    assert gone() is None


def test_after_the_shutdown_what_was_taken_ends_and_nothing_more_is_taken() -> None:
    threads = CallThreads(1, "shut_down")
    call = begun(threads)
    waiting = submit(threads)
    threads.shutdown()
    with pytest.raises(RuntimeError):
        threads.submit(lambda: None)
    call.end()
    waiting.end()
    wait_until(lambda: not any(each.name == "shut_down_0" for each in threading.enumerate()))


def test_a_calls_thread_knows_when_the_call_was_received() -> None:
    threads = CallThreads(1, "test")
    held = begun(threads)
    received: list[int] = []
    before_ns = time.monotonic_ns()
    later = threads.submit(lambda: received.append(threads.moments.taken_ns))
    after_ns = time.monotonic_ns()
    over = threading.Event()
    later.add_done_callback(lambda _: over.set())
    held.end()
    assert over.wait(TIMEOUT_S)
    threads.shutdown()
    assert before_ns <= received[0] <= after_ns
    assert threads.moments.taken_ns == 0


def test_a_call_waits_where_the_system_gives_no_thread() -> None:
    threads, ran = CallThreads(1, "test"), threading.Event()
    with no_more_threads():
        # An error would end the one thread on which grpc receives all calls.
        threads.submit(ran.set)
    assert not ran.is_set()
    assert len(threads.waiting) == 1
    begun(threads).end()
    assert ran.wait(TIMEOUT_S)
    assert (len(threads._threads), len(threads.waiting)) == (1, 0)
    threads.shutdown()
