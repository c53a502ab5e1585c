"""TraceSetting: sets which requests are traced, for all models and per model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from edge_server.inference.tracing.tracer import Tracer

log = logging.getLogger(__name__)

_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
# The names of `TraceRule`, and the minimum of each.
_NUMBERS = {
    "trace_rate": ("rate", 0),
    "trace_count": ("count", -1),
    "log_frequency": ("log_frequency", 0),
}
_NAMES = ("trace_file", "trace_level", *_NUMBERS, "trace_mode")
_MOST = 2**31 - 1


def update_trace_settings(tracer: Tracer, model_name: str, settings: Any) -> Any:
    """Apply a `TraceSettingRequest`'s settings, all or none; return the settings then in force.

    A setting without a value is reset: a model's to the global one, the global one to its value at
    the start.

    Args:
        model_name: of a loaded model; empty is all.

    Raises:
        InvalidRequest: an unknown setting, or an invalid value (Triton's texts).
        Unsupported: a setting that is fixed at the start of the server, or tensors.
    """
    changes = dict(_checked(name, tuple(value.value)) for name, value in settings.items())
    before = tracer.rule(model_name)
    if changes:
        tracer.change(model_name, changes)
    rule = tracer.rule(model_name)
    if rule.timestamps and not before.timestamps and not tracer.file_name:
        log.warning(
            "trace: a client asks for traces, and no file was chosen for them "
            "(--trace-config triton,file=FILE)"
        )
    told = {
        "trace_file": tracer.file_name,
        "trace_level": "TIMESTAMPS" if rule.timestamps else "OFF",
        "trace_rate": str(rule.rate),
        "trace_count": str(rule.count),
        "log_frequency": str(rule.log_frequency),
        "trace_mode": "triton",
    }
    response = pb.TraceSettingResponse()
    for name, value in told.items():
        response.settings[name].value.append(value)
    return response


def _checked(name: str, values: tuple[str, ...]) -> tuple[str, int | None]:
    """Return the change, by the names of `TraceRule`; None resets the setting."""
    if name == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol")
    if name == "trace_mode":
        raise Unsupported("trace mode can not be updated through network protocol")
    if name not in _NAMES:
        raise InvalidRequest(f"unknown trace setting '{name}'; known: {', '.join(_NAMES)}")
    if name == "trace_level":
        return "timestamps", _timestamps(values)
    if len(values) > 1:
        raise InvalidRequest(f"expect only 1 value for '{name}'")
    field, least = _NUMBERS[name]
    return field, _number(name, values[0], least) if values else None


def _timestamps(levels: tuple[str, ...]) -> bool | None:
    """Return whether those levels trace timestamps; None without levels."""
    for level in levels:
        if level not in _LEVELS:
            raise InvalidRequest(f"unknown trace level '{level}'; known: {', '.join(_LEVELS)}")
    if "OFF" in levels and len(levels) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    if "TENSORS" in levels:
        raise Unsupported(
            "trace level TENSORS is not supported: no tensors are written to traces; set "
            "TIMESTAMPS alone"
        )
    return "TIMESTAMPS" in levels if levels else None


def _number(name: str, value: str, least: int) -> int:
    digits = value.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) < 11:
        number = int(value)
        if least <= number <= _MOST:
            return number
    raise InvalidRequest(f"Unable to parse '{name}', got: {value}")
