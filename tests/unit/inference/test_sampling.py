"""Which requests are traced: one of so many, up to a number, for all models or for one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.inference.tracing import Sampler, Tracer, TraceRule

ON = TraceRule(timestamps=True, rate=1)


def taken(sampler: Sampler, requests: int) -> list[int]:
    """The places of those that are traced, from 1."""
    return [place for place in range(1, requests + 1) if sampler.take()]


@given(st.integers(1, 20), st.integers(-1, 5), st.integers(0, 100))
def test_the_last_of_every_rate_is_traced_until_the_count_is_used_up(
    rate: int, count: int, requests: int
) -> None:
    sampler = Sampler(TraceRule(timestamps=True, rate=rate, count=count))
    every = list(range(rate, requests + 1, rate))
    expected = every if count < 0 else every[:count]
    assert taken(sampler, requests) == expected
    assert sampler.rule_now.count == (count if count < 0 else count - len(expected))


def test_nothing_is_traced_where_it_is_off() -> None:
    assert taken(Sampler(replace(ON, timestamps=False, rate=0)), 10) == []


def test_a_model_without_a_rule_of_its_own_is_counted_with_all_others() -> None:
    tracer = Tracer(replace(ON, rate=4))
    tracer.change("own", {"rate": 2})
    counts: Counter[str] = Counter()
    for model in ("a", "own", "b", "own") * 4:
        counts[model] += tracer.sampler(model).take()
    assert counts == {"a": 0, "b": 2, "own": 4}


def test_a_setting_not_given_for_a_model_is_that_of_all() -> None:
    tracer = Tracer(TraceRule())
    tracer.change("m", {"log_frequency": 3})
    assert tracer.sampler("m").rule == TraceRule(log_frequency=3)
    tracer.change("", {"timestamps": True, "rate": 7})
    assert tracer.sampler("m").rule == TraceRule(timestamps=True, rate=7, log_frequency=3)
    tracer.change("m", {"log_frequency": None})
    assert tracer.sampler("m") is tracer.sampler("")
    tracer.change("", {"timestamps": None, "rate": None})
    assert tracer.sampler("m").rule == TraceRule()


def test_another_setting_leaves_what_is_left_of_a_count() -> None:
    tracer = Tracer(TraceRule())
    tracer.change("", {"timestamps": True, "rate": 1, "count": 5})
    assert taken(tracer.sampler(""), 2) == [1, 2]
    tracer.change("", {"log_frequency": 9})
    assert tracer.sampler("").rule_now.count == 3
    tracer.change("", {"count": 5})
    assert tracer.sampler("").rule_now.count == 5


def test_a_change_of_all_leaves_models_with_all_settings_alone() -> None:
    tracer = Tracer(TraceRule())
    tracer.change("m", {"timestamps": True, "rate": 5, "count": 3, "log_frequency": 0})
    before = tracer.sampler("m")
    tracer.change("", {"rate": 9})
    assert tracer.sampler("m") is before


@pytest.mark.parametrize("model_name", ["", "m"])
def test_a_rate_of_zero_is_allowed_without_timestamps(model_name: str) -> None:
    tracer = Tracer(TraceRule())
    tracer.change(model_name, {"rate": 0})
    with pytest.raises(InvalidRequest, match="invalid trace setting :sample rate must be non-zero"):
        tracer.change(model_name, {"timestamps": True, "count": 1})
    assert tracer.sampler(model_name).rule == TraceRule(rate=0)


def test_a_rule_of_all_that_would_break_a_models_changes_nothing() -> None:
    tracer = Tracer(TraceRule())
    tracer.change("m", {"timestamps": True})
    with pytest.raises(InvalidRequest):
        tracer.change("", {"rate": 0})
    assert tracer.sampler("").rule == TraceRule()
