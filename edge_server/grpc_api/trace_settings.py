"""TraceSetting: which requests shall be traced, for all models and for each.

The settings are kept and told. Nothing writes traces yet, which is why the server does not
advertise the extension, and why `trace_file` is empty.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

Values = dict[str, tuple[str, ...]]

_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_AT_START: Values = {
    "trace_file": ("",),
    "trace_level": ("OFF",),
    "trace_rate": ("1000",),
    "trace_count": ("-1",),
    "log_frequency": ("0",),
    "trace_mode": ("triton",),
}
_LEAST = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_MOST = 2**31 - 1


class TraceSettings:
    """The settings of all models, and those in which single models differ; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_all: Values = {}
        self._of_model: dict[str, Values] = {}

    def update(self, model_name: str, settings: Any) -> Any:
        """Put a `TraceSettingRequest`'s settings in force, all or none; those that are then so.

        A setting without a value goes back: a model's to that of all models, that of all models
        to what it was at the start.

        Args:
            model_name: of a loaded model; empty is all.

        Raises:
            InvalidRequest: an unknown setting, or a value that it cannot have (Triton's texts).
            Unsupported: a setting that only the start of the server can choose.
        """
        changes = {name: _checked(name, value.value) for name, value in settings.items()}
        with self._lock:
            if changes:
                old = self._of_model.get(model_name, {}) if model_name else self._of_all
                new = {name: values for name, values in {**old, **changes}.items() if values}
                if model_name:
                    self._of_model[model_name] = new
                else:
                    self._of_all = new
            told = {**_AT_START, **self._of_all, **self._of_model.get(model_name, {})}
        response = pb.TraceSettingResponse()
        for name, values in told.items():
            response.settings[name].value.extend(values)
        return response


def _checked(name: str, values: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(values)
    if name == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol")
    if name == "trace_mode":
        raise Unsupported("trace mode can not be updated through network protocol")
    if name not in _AT_START:
        raise InvalidRequest(f"unknown trace setting '{name}'; known: {', '.join(_AT_START)}")
    if name == "trace_level":
        for level in checked:
            if level not in _LEVELS:
                raise InvalidRequest(f"unknown trace level '{level}'; known: {', '.join(_LEVELS)}")
        if "OFF" in checked and len(checked) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified")
        return checked
    if len(checked) > 1:
        raise InvalidRequest(f"expect only 1 value for '{name}'")
    for value in checked:
        digits = value.removeprefix("-")
        number = int(value) if digits.isascii() and digits.isdecimal() and len(digits) < 11 else -2
        if not _LEAST[name] <= number <= _MOST:
            raise InvalidRequest(f"Unable to parse '{name}', got: {value}")
    return checked
