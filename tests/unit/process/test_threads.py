"""Work that waits is done together, and one that fails costs the others nothing."""

from __future__ import annotations

import threading

import pytest

from edge_server.process.threads import run_parallel, side_by_side, start_thread


def test_all_run_at_the_same_time_and_are_waited_for() -> None:
    # None of them gets on before all have begun.
    together = threading.Barrier(8, timeout=30)
    done: list[int] = []

    def work(number: int) -> None:
        together.wait()
        done.append(number)

    side_by_side([lambda n=n: work(n) for n in range(8)], "work")  # type: ignore[misc]
    assert sorted(done) == list(range(8))


def test_what_one_raises_is_logged_and_the_others_are_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("as asked")

    side_by_side([fail, lambda: done.append(1), fail, lambda: done.append(2)], "close-model")
    assert sorted(done) == [1, 2]
    assert caplog.text.count("close-model: failed") == 2
    assert "as asked" in caplog.text


def test_without_room_for_threads_the_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    side_by_side([lambda: done.append(1), lambda: done.append(2)], "work")
    assert done == [1, 2]
    assert run_parallel("work", 4, str, [1, 2, 3]) == ["1", "2", "3"]
    assert not start_thread("work", lambda: done.append(3))
    assert done == [1, 2]


def test_results_are_in_order_and_no_more_run_at_a_time_than_allowed() -> None:
    running, lock = [0, 0], threading.Lock()

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            running[1] = max(running)
        threading.Event().wait(0.001)
        with lock:
            running[0] -= 1
        return 2 * number

    assert run_parallel("work", 3, work, range(20)) == list(range(0, 40, 2))
    assert running[1] <= 3
    assert run_parallel("work", 3, work, []) == []


def test_the_others_are_done_before_an_exception_is_raised() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("as asked")
        done.append(number)

    with pytest.raises(ValueError, match="as asked"):
        run_parallel("work", 2, work, range(5))
    assert sorted(done) == [0, 2, 3, 4]
