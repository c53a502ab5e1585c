"""Trace and log settings: all of a request takes effect, or nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.triton_calls import update_log_settings, update_trace_settings
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.inference.tracing import Tracer, TraceRule
from edge_server.process.logs import LogFormatter, LogSwitches

if TYPE_CHECKING:
    from collections.abc import Iterator


def trace(**values: list[str]) -> object:
    request = pb.TraceSettingRequest()
    for name, several in values.items():
        request.settings[name].value.extend(several)
    return request.settings


def values_of(response: pb.TraceSettingResponse, name: str) -> list[str]:
    return list(response.settings[name].value)


def test_a_models_setting_goes_before_that_of_all_until_it_is_cleared() -> None:
    tracer = Tracer()
    update_trace_settings(tracer, "", trace(trace_rate=["5"]))
    response = update_trace_settings(tracer, "m", trace(trace_rate=["9"]))
    assert values_of(response, "trace_rate") == ["9"]
    assert values_of(update_trace_settings(tracer, "", trace()), "trace_rate") == ["5"]
    response = update_trace_settings(tracer, "m", trace(trace_rate=[]))
    assert values_of(response, "trace_rate") == ["5"]
    response = update_trace_settings(tracer, "", trace(trace_rate=[]))
    assert values_of(response, "trace_rate") == ["1000"]


def test_trace_settings_begin_as_they_were_chosen() -> None:
    tracer = Tracer(TraceRule(timestamps=True, rate=7, count=3))
    update_trace_settings(tracer, "", trace(trace_rate=["5"], trace_level=["OFF"]))
    response = update_trace_settings(tracer, "", trace(trace_rate=[], trace_level=[]))
    assert {name: list(each.value) for name, each in response.settings.items()} == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["7"],
        "trace_count": ["3"],
        "log_frequency": ["0"],
        "trace_file": [""],
        "trace_mode": ["triton"],
    }


def test_a_request_for_traces_without_a_file_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer()
    update_trace_settings(tracer, "", trace(trace_level=["OFF"]))
    assert not caplog.records
    for _ in range(2):
        update_trace_settings(tracer, "", trace(trace_level=["TIMESTAMPS"]))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("trace_file", ["x"], "trace file location can not be updated through network protocol"),
        ("trace_level", ["OFF", "TENSORS"], "Expect only one trace level 'OFF' is specified"),
        ("trace_level", ["LOUD"], "unknown trace level 'LOUD'"),
        ("trace_level", ["TIMESTAMPS", "TENSORS"], "trace level TENSORS is not supported"),
        ("trace_rate", ["x"], "Unable to parse 'trace_rate', got: x"),
        ("trace_rate", ["-1"], "Unable to parse 'trace_rate', got: -1"),
        ("trace_count", ["99999999999"], "Unable to parse 'trace_count', got: 99999999999"),
        ("trace_rate", ["1", "2"], "expect only 1 value for 'trace_rate'"),
        ("trace_speed", ["1"], "unknown trace setting 'trace_speed'"),
    ],
)
def test_a_trace_setting_that_cannot_be_changes_nothing(
    name: str, values: list[str], says: str
) -> None:
    tracer = Tracer()
    before = update_trace_settings(tracer, "", trace())
    with pytest.raises(EdgeServerError, match=says):
        update_trace_settings(tracer, "", trace(log_frequency=["3"], **{name: values}))
    assert update_trace_settings(tracer, "", trace()) == before


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    logger = logging.getLogger()
    level, formatters = logger.level, {handler: handler.formatter for handler in logger.handlers}
    yield logger
    logger.setLevel(level)
    for handler, formatter in formatters.items():
        handler.setFormatter(formatter)
        for each in list(handler.filters):
            handler.removeFilter(each)


def log_request(**values: dict[str, object]) -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    for name, value in values.items():
        request.settings[name].CopyFrom(pb.LogSettingsRequest.SettingValue(**value))
    return request


def test_log_settings_decide_what_is_written(
    root: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    switches = LogSwitches()
    log = logging.getLogger("edge_server.test")

    def written() -> list[str]:
        caplog.clear()
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            log.log(level, "%s", level)
        return [record.levelname for record in caplog.records]

    update_log_settings(switches, log_request(log_info={"bool_param": False}))
    assert written() == ["WARNING", "ERROR"]
    update_log_settings(
        switches,
        log_request(log_verbose_level={"uint32_param": 1}, log_error={"bool_param": False}),
    )
    assert written() == ["DEBUG", "WARNING"]
    response = update_log_settings(
        switches,
        log_request(
            log_info={"bool_param": True},
            log_error={"bool_param": True},
            log_verbose_level={"uint32_param": 0},
        ),
    )
    assert written() == ["INFO", "WARNING", "ERROR"]
    assert response.settings["log_format"].string_param == "default"


def test_the_time_of_a_line_can_be_iso8601(root: logging.Logger) -> None:
    switches = LogSwitches()
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(switches))
    root.addHandler(handler)
    try:
        record = logging.makeLogRecord({"created": 0.0, "msg": "x", "levelname": "INFO"})
        update_log_settings(switches, log_request(log_format={"string_param": "ISO8601"}))
        assert handler.format(record) == "1970-01-01T00:00:00Z I x"
        update_log_settings(switches, log_request(log_format={"string_param": "default"}))
        assert "T" not in handler.format(record)
    finally:
        root.removeHandler(handler)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("log_info", {"uint32_param": 1}, "expect boolean for 'log_info'"),
        ("log_verbose_level", {"bool_param": True}, "expect int32 for 'log_verbose_level'"),
        ("log_format", {"string_param": "x"}, "invalid argument for log_format, got: x"),
        ("log_loud", {"bool_param": True}, "unknown log setting 'log_loud'"),
    ],
)
def test_a_log_setting_that_cannot_be_changes_nothing(
    root: logging.Logger, name: str, value: dict[str, object], says: str
) -> None:
    switches = LogSwitches()
    before = switches.settings
    with pytest.raises(InvalidRequest, match=says):
        update_log_settings(
            switches, log_request(log_warning={"bool_param": False}, **{name: value})
        )
    assert switches.settings == before
