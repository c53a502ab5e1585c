"""The tracer: what is chosen is written, in the background and up to what is bounded."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from edge_server.inference import tracing
from edge_server.inference.tracing import Sampler, TraceFile, Tracer, TraceRule, TraceWriter

if TYPE_CHECKING:
    from pathlib import Path


ON = TraceRule(timestamps=True, rate=1)


def run(tracer: Tracer, model_name: str, request_id: str = "") -> bool:
    """One request; whether it was traced."""
    trace = tracer.sample(model_name, request_id)
    if trace is None:
        return False
    trace.begin(1)
    trace.responded(final=True)
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def traced_ids(path: Path) -> list[str]:
    return [each["request_id"] for each in json.loads(path.read_text()) if "model_name" in each]


def test_all_that_was_taken_is_written_by_the_end(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer = TraceWriter(TraceFile(str(path)))
    tracer = Tracer(ON, writer)
    writer.start()
    for number in range(100):
        assert run(tracer, "m", str(number))
    writer.stop(30.0)
    assert traced_ids(path) == [str(number) for number in range(100)]
    assert f"trace {path}: 100 requests written, 0 dropped" in caplog.text
    assert not run(tracer, "m")


def test_beyond_what_may_wait_requests_are_dropped_and_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 100)
    writer = TraceWriter(TraceFile(str(path)))
    tracer = Tracer(ON, writer)
    for number in range(tracing.MOST_WAITING + 7):
        run(tracer, "m", str(number))
    assert writer.dropped == 7
    writer.start()
    writer.stop(30.0)
    assert len(traced_ids(path)) == tracing.MOST_WAITING


def test_where_there_is_no_more_room_nothing_is_traced_any_more(path: Path) -> None:
    file = TraceFile(str(path), most_bytes=4096)
    writer = TraceWriter(file)
    tracer = Tracer(ON, writer)
    assert run(tracer, "m")
    assert not file.write(Sampler(ON), bytes(5000))
    assert not run(tracer, "m")
    assert not tracer.on


def test_without_a_file_rules_are_kept_and_nothing_is_traced() -> None:
    tracer = Tracer()
    tracer.change("", {"timestamps": True, "rate": 1})
    assert tracer.rule("m") == ON
    assert not tracer.on
    assert not run(tracer, "m")
    assert tracer.file_name == ""


def test_it_is_on_while_any_model_is_traced(path: Path) -> None:
    tracer = Tracer(TraceRule(), TraceWriter(TraceFile(str(path))))
    assert not tracer.on
    tracer.change("m", {"timestamps": True, "rate": 2})
    assert tracer.on
    assert [run(tracer, name) for name in ("m", "n", "m", "n")] == [False, False, True, False]
    tracer.change("m", {"timestamps": None})
    assert not tracer.on


def test_rules_that_begin_anew_replace_those_of_clients(path: Path) -> None:
    tracer = Tracer(TraceRule(), TraceWriter(TraceFile(str(path))))
    tracer.change("", {"rate": 0})
    tracer.change("m", {"rate": 5})
    tracer.begin_anew(ON)
    assert tracer.on
    assert tracer.rule("m") == tracer.rule("") == ON
    tracer.begin_anew(TraceRule())
    assert not tracer.on
