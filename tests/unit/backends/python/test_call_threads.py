"""What a model asks for is done beside each other, on as many threads as that takes."""

from __future__ import annotations

import threading

import pytest

from edge_server.backends.python.call_threads import NestedCallThreads
from tests.unit.inference.threads import no_more_threads

PATIENCE_S = 10.0


def test_each_piece_of_work_that_waits_has_a_thread_and_idle_ones_are_used_again() -> None:
    threads = NestedCallThreads("m_0")
    meeting = threading.Barrier(4)
    over = threading.Semaphore(0)

    def meet() -> None:
        meeting.wait(PATIENCE_S)
        over.release()

    for _ in range(3):
        threads.run(meet)
    meeting.wait(PATIENCE_S)
    for _ in range(3):
        assert over.acquire(timeout=PATIENCE_S)
    assert [t.name for t in threads._threads] == ["calls of m_0"] * 3
    threads.close()
    for thread in threads._threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_no_more_than_sixteen_wait_at_once_and_the_next_waits_for_its_turn() -> None:
    threads = NestedCallThreads("m_0")
    go_on, done = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        go_on.wait(PATIENCE_S)
        done.release()

    for _ in range(20):
        threads.run(work)
    assert len(threads._threads) == 16
    go_on.set()
    for _ in range(20):
        assert done.acquire(timeout=PATIENCE_S)
    threads.close()


def test_what_is_too_much_is_refused_and_taken_again_later() -> None:
    threads = NestedCallThreads("m_0")
    go_on, done = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        go_on.wait(PATIENCE_S)
        done.release()

    taken = sum(threads.run(work) for _ in range(2000))
    assert taken == 1024
    go_on.set()
    for _ in range(taken):
        assert done.acquire(timeout=PATIENCE_S)
    while not threads.run(done.release):
        pass
    assert done.acquire(timeout=PATIENCE_S)
    threads.close()


def test_after_the_end_nothing_is_begun() -> None:
    threads = NestedCallThreads("m_0")
    threads.close()
    threads.run(lambda: None)
    assert threads._threads == []


def test_a_thread_that_cannot_be_started_is_not_counted_and_those_there_are_do_the_work() -> None:
    threads, went_on, over = NestedCallThreads("m_0"), threading.Event(), threading.Semaphore(0)
    with no_more_threads(), pytest.raises(RuntimeError):
        threads.run(over.release)
    threads.run(lambda: went_on.wait(PATIENCE_S) and over.release())
    with no_more_threads():
        threads.run(over.release)
    went_on.set()
    for _ in range(2):
        assert over.acquire(timeout=PATIENCE_S)
    threads.close()
