"""A traced request is reported of once, with all that it started, when all of that is over."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.inference.tracing import (
    ModelTrace,
    Sampler,
    TracedRequest,
    TraceRule,
)


class Reported(list[TracedRequest]):
    """What was reported, and a way to begin."""

    def root(self, model_name: str = "m", request_id: str = "") -> ModelTrace:
        request = TracedRequest(Sampler(TraceRule()), itertools.count(1), self.append)
        trace = request.trace(model_name, request_id)
        assert trace is not None
        return trace


@pytest.fixture
def reported() -> Reported:
    return Reported()


def elements(request: TracedRequest) -> list[dict[str, Any]]:
    return json.loads(b"[" + request.written() + b"]")


def child_of(trace: ModelTrace, name: str, request_id: str = "") -> ModelTrace:
    child = trace.child(name, request_id)
    assert child is not None
    return child


def test_it_is_written_as_triton_does(reported: Reported) -> None:
    root = reported.root("whole", 'say "7"')
    root.begin(3)
    child = child_of(root, "part")
    child.begin(1)
    child.mark("COMPUTE_START", 5)
    child.responded(final=True)
    root.responded(final=True)
    head, times, child_head, child_times = elements(reported[0])
    assert list(head.items()) == [
        ("id", 1),
        ("model_name", "whole"),
        ("model_version", 3),
        ("request_id", 'say "7"'),
    ]
    assert child_head == {"id": 2, "model_name": "part", "model_version": 1, "parent_id": 1}
    assert (times["id"], [each["name"] for each in times["timestamps"]]) == (
        1,
        ["REQUEST_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"],
    )
    assert child_times["timestamps"][0] == {"name": "COMPUTE_START", "ns": 5}
    assert [each["name"] for each in child_times["timestamps"]] == [
        "COMPUTE_START",
        "REQUEST_START",
        "REQUEST_END",
    ]


@given(st.lists(st.integers(0, 50), max_size=8))
def test_moments_are_written_in_their_order(moments: list[int]) -> None:
    reported = Reported()
    root = reported.root()
    root.begin(1)
    for moment in moments:
        root.mark(f"at {moment}", moment)
    root.responded(final=True)
    times = [each["ns"] for each in elements(reported[0])[1]["timestamps"]]
    assert times == sorted(times)


@given(st.permutations(["root", "child", "call"]))
def test_it_is_reported_when_the_last_of_it_is_over(order: list[str]) -> None:
    reported = Reported()
    root = reported.root()
    root.request.hold()
    child = child_of(root, "c")
    for trace in (root, child):
        trace.begin(1)
    end = {
        "root": lambda: root.responded(final=True),
        "child": lambda: child.responded(final=True),
        "call": root.request.release,
    }
    for name in order:
        assert not reported
        end[name]()
    (request,) = reported
    assert len(request) == 2


def test_only_the_first_of_several_responses_is_a_moment(reported: Reported) -> None:
    root = reported.root()
    root.begin(1)
    for final in (False, False, True):
        root.responded(final=final)
    names = [each["name"] for each in elements(reported[0])[1]["timestamps"]]
    assert names == ["REQUEST_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"]


def test_what_begins_after_the_end_is_not_reported(reported: Reported) -> None:
    root = reported.root()
    root.begin(1)
    late = child_of(root, "late")
    root.responded(final=True)
    late.begin(1)
    late.responded(final=True)
    assert len(reported) == 1


def test_one_that_no_model_took_is_not_reported(reported: Reported) -> None:
    root = reported.root()
    root.request.hold()
    root.request.release()
    assert not reported


def test_a_request_that_makes_ever_more_does_not_fill_the_memory(reported: Reported) -> None:
    root = reported.root("m", "x" * 5000)
    root.begin(1)
    children = [root.child("c", "") for _ in range(2000)]
    assert children[0] is not None
    assert children[-1] is None
    root.responded(final=True)
    assert len(elements(reported[0])[0]["request_id"]) == 1024
