"""What a measurement shows of latencies, of failures, and of the stages in the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.client import DaemonClient
from edge_server.cli.bench import (
    Measurement,
    StageTimes,
    _progress,
    latencies,
    measure,
    report_lines,
    stages_between,
)
from edge_server.cli.main import run_command
from edge_server.cli.verbs import numbers
from edge_server.errors import Unavailable
from edge_server.model_config.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable


def test_percentiles_are_those_of_the_requests() -> None:
    percentiles = {"p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0}
    found = latencies([float(ms) for ms in range(1, 102)])
    assert found == {"mean": 51.0, "max": 101.0, **percentiles}


def statistics(name: str, count: int, ns: int) -> pb.ModelStatistics:
    found = pb.ModelStatistics(name=name, version="1")
    for stage, share in (("success", 10), ("queue", 1), ("compute_infer", 8)):
        getattr(found.inference_stats, stage).ns = ns * share // 10
    found.inference_stats.success.count = count
    return found


def test_stages_are_the_means_between_two_readings_and_members_come_after_the_ensemble() -> None:
    text = """name: "e" platform: "ensemble"
    ensemble_scheduling { step { model_name: "b" } step { model_name: "idle" } }"""
    config = ModelConfig.of(text_format.Parse(text, config_pb.ModelConfig()))
    before = {"e": statistics("e", 5, 50_000_000), "idle": statistics("idle", 1, 1)}
    after = {
        "b": statistics("b", 10, 40_000_000),
        "e": statistics("e", 15, 250_000_000),
        "idle": statistics("idle", 1, 1),
        "other": statistics("other", 9, 9),
    }
    assert stages_between(config, before, after) == (
        StageTimes("e", 10, 20.0, 2.0, 0.0, 16.0, 0.0),
        StageTimes("b", 10, 4.0, 0.4, 0.0, 3.2, 0.0),
    )


def measurement(concurrency: int, per_s: float, **changes: object) -> Measurement:
    usual = {
        "requests": 100,
        "failed": 0,
        "stages": (StageTimes("m", 100, 18.5, 1.0, 0.25, 17.0, 0.25),),
        "latency_ms": {"mean": 20, "max": 31, "p50": 19, "p90": 25, "p95": 28, "p99": 30},
        "transport_ms": 1.5,
    }
    return Measurement(concurrency, per_s, **{**usual, **changes})


def test_the_tables_have_a_row_for_each_concurrency_and_each_stage() -> None:
    text = list(report_lines([measurement(1, 50.0), measurement(2, 60.0, failed=3)]))
    assert " ".join(text[1].split()) == "1 50.0 20.00 19.00 25.00 28.00 30.00 31.00 100"
    assert text[2].endswith("100  3 failed")
    assert any(
        line.split() == ["1", "m", "100", "18.50", "1.00", "0.25", "17.00", "0.25"] for line in text
    )
    assert any(line.split() == ["1", "gRPC", "and", "client", "1.50"] for line in text)


class Refuses(DaemonClient):
    """A client whose model refuses every request but the third."""

    def __init__(self) -> None:
        self.sent = 0

    def prepared(self, request: Any, timeout_s: float) -> Callable[[], object]:
        return self._send

    def _send(self) -> None:
        self.sent += 1
        if self.sent != 3:
            raise Unavailable("busy")

    def statistics(self) -> tuple[()]:
        return ()


def test_failed_requests_are_counted_and_without_any_other_the_reason_is_raised() -> None:
    model = ModelConfig.of(text_format.Parse('name: "m"', config_pb.ModelConfig()))
    found = measure(Refuses(), model, {}, 1, batch=2, seconds=0.1)
    assert found.requests == 1
    assert found.failed >= 1
    with pytest.raises(Unavailable, match="no request to 'm' succeeded: busy"):
        measure(Refuses(), model, {}, 1, batch=2, seconds=0.0)


@pytest.mark.parametrize(
    ("text", "found"), [("1,2,4", (1, 2, 4)), ("2:4", (2, 3, 4)), ("3", (3,)), ("1,1", (1,))]
)
def test_numbers_are_a_list_or_a_range(text: str, found: tuple[int, ...]) -> None:
    assert numbers(1)(text) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--concurrency", "0"], "give whole numbers, 1 or above, like 1,2,4 or 1:4"),
        (["m", "--concurrency", "4:1"], "give whole numbers"),
        (["m", "--seconds", "0"], "give seconds, above 0, up to 3600"),
        (["m", "--second", "1"], "did you mean --seconds?"),
    ],
)
def test_a_wrong_command_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_terminal_each_measurement_is_announced_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _progress() as show:
        show("m: 1 at a time, 5 s")
    assert capsys.readouterr().err == "m: 1 at a time, 5 s …\n"
