"""Requests are counted once, by what became of them; models that are gone are forgotten."""

from __future__ import annotations

from typing import Any

from edge_server.api.calls import RequestMetrics
from edge_server.errors import Unavailable


def test_a_stream_of_responses_is_one_request() -> None:
    requests, given = RequestMetrics(), []

    def respond(response: Any, final: bool) -> None:
        given.append((response, final))

    timed = requests.timed("grpc", "m", respond, lambda _: "UNAVAILABLE")
    timed(None, False)
    timed(None, True)
    failing = requests.timed("grpc", "m", respond, lambda _: "UNAVAILABLE")
    failing(Unavailable("no"), True)
    assert [final for _, final in given] == [False, True, True]
    assert requests.latencies(["m"])["m", "grpc"].at_most[-1] == 1
    assert requests.failures() == {("grpc", "UNAVAILABLE"): 1}


def test_models_that_are_gone_are_forgotten() -> None:
    requests = RequestMetrics()
    requests.responded("grpc", "old", 0)
    requests.responded("http", "new", 0)
    assert set(requests.latencies(["new"])) == {("new", "http")}
    assert set(requests.latencies(["old", "new"])) == {("new", "http")}
