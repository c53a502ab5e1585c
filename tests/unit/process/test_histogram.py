"""Histograms lose no observation, whichever thread makes it, and forget what is gone."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from edge_server.process.histogram import Histograms


@given(st.lists(st.floats(0, 10), max_size=30))
def test_each_bucket_counts_what_is_no_longer_than_its_bound(seconds: list[float]) -> None:
    histograms = Histograms((0.1, 1.0))
    for each in seconds:
        histograms.observe({("a",): each})
    found = histograms.distributions().get(("a",))
    if not seconds:
        assert found is None
        return
    assert found is not None
    assert found.at_most == (
        sum(each <= 0.1 for each in seconds),
        sum(each <= 1.0 for each in seconds),
        len(seconds),
    )
    assert abs(found.total - sum(seconds)) < 1e-9


def test_observations_of_many_threads_add_up() -> None:
    histograms = Histograms((1.0,))

    def observe() -> None:
        for _ in range(2000):
            histograms.observe({("a",): 0.5})
            histograms.observe({("b",): 2.0})

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = histograms.distributions()
    assert found["a",].at_most == (8000, 8000)
    assert found["b",].at_most == (0, 8000)


def test_what_is_forgotten_begins_anew() -> None:
    histograms = Histograms((1.0,))
    histograms.observe({("a", "x"): 0.5})
    histograms.observe({("b", "x"): 0.5})
    histograms.forget("a")
    assert set(histograms.distributions()) == {("b", "x")}
