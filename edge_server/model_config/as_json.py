"""A model's configuration as Triton writes it in JSON."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

# Protobuf writes 64-bit integers as strings. For these fields Triton converts them back to numbers,
# so that a model may use `dims` directly.
_INTEGERS = frozenset(
    {
        "dims",
        "shape",
        "versions",
        "model_version",
        "max_queue_delay_microseconds",
        "default_timeout_microseconds",
        "max_sequence_idle_microseconds",
    }
)


def config_json(message: Any) -> dict[str, Any]:
    """Return an `inference.ModelConfig` as the dict that Triton gives to `model.py`; unset fields
    are present with their defaults."""
    whole = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    made: dict[str, Any] = _with_integers(whole)
    return made


def _with_integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_integers(element) for element in value]
    if not isinstance(value, dict):
        return value
    return {k: _integers(v) if k in _INTEGERS else _with_integers(v) for k, v in value.items()}


def _integers(value: Any) -> Any:
    if isinstance(value, dict):
        # A parameter of that name, not the field.
        return _with_integers(value)
    return [int(element) for element in value] if isinstance(value, list) else int(value)
