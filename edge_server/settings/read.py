"""TOML → frozen structs; an error names file, key and remedy."""

from __future__ import annotations

import difflib
import re
import sys
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from edge_server.errors import SettingsError
from edge_server.settings.mistakes import in_words
from edge_server.settings.python import Python
from edge_server.settings.sections import (
    NAME,
    CameraSection,
    DeviceSection,
    LogSection,
    Mqtt,
    Repository,
    Settings,
)
from edge_server.settings.serving import Metrics, RateLimitResourceSection, Serving, TraceSection
from edge_server.settings.transport import Grpc, Restriction, Tls

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edge_server.settings.section import Section


def read_settings(path: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Return the settings in `path`, with `overrides` (the same nested form) laid over them.

    Relative paths in the file are relative to the working directory, as on the command line.

    Raises:
        SettingsError: the file is unreadable or not TOML, or has an unknown key or a bad value.
    """
    below = {} if path is None else _read_toml(path)
    merged = _merge(below, overrides)
    if (fault := _fault(merged)) is None:
        return msgspec.convert(merged, Settings, strict=True)
    # A fault that the file has on its own is not the command line's.
    blamed = path if path is not None and fault == _fault(below) else "command line"
    raise SettingsError(f"{blamed}: {fault}")


def _fault(table: Mapping[str, Any]) -> str | None:
    """Return the fault of `table`; None if it is valid."""
    try:
        msgspec.convert(table, Settings, strict=True)
    except msgspec.ValidationError as error:
        return _explain(str(error), table)
    return None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
    return table


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with `above` laid over it, key by key.

    A value of `below` stays where `above` has a table, and is reported as a mistake.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key, {})
        if not isinstance(value, dict):
            merged[key] = value
        elif isinstance(old, dict):
            merged[key] = _merge(old, value)
    return merged


def _explain(text: str, table: Mapping[str, Any]) -> str:
    """Return msgspec's message as `grpc.port: fault`, with the nearest key for an unknown one."""
    cameras = table.get("cameras")
    cameras = cameras if isinstance(cameras, dict) else {}
    message, _, location = text.partition(" - at ")
    if location.startswith("`key`"):
        names = ", ".join(name for name in cameras if not re.search(NAME, name))
        return f"cameras: a name has {_NAME_IN_WORDS}; got: {names}"
    message = message.replace(
        f"Expected `str` matching regex {NAME!r}", f"expected {_NAME_IN_WORDS}"
    )
    path = location.strip("`").removeprefix("$").lstrip(".")
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        key = unknown[1]
        known = _KEYS.get(path.partition("[")[0], Settings).__struct_fields__
        nearest = difflib.get_close_matches(key, known, n=1)
        hint = f'did you mean "{nearest[0]}"?' if nearest else f"known: {', '.join(known)}"
        message, path = f"unknown key; {hint}", f"{path}.{key}".lstrip(".")
    elif missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        message, path = "is missing, and has no default", f"{path}.{missing[1]}"
    elif message.startswith("Invalid enum value "):
        got = message.removeprefix("Invalid enum value ")
        message = f"expected one of {', '.join(_words(path))}; got {got}"
    if "[...]" in path:
        path = path.replace("[...]", f".{_first_faulty(cameras)}")
    if message.lower().startswith("expected `") or message.startswith(f"expected {_NAME_IN_WORDS}"):
        message = in_words(message, path, table)
    return f"{path}: {message}" if path else message


def _first_faulty(cameras: Mapping[str, Any]) -> str:
    """Return the first camera with a fault: msgspec's message does not name the camera."""
    for name, table in cameras.items():
        try:
            msgspec.convert(table, CameraSection, strict=True)
        except msgspec.ValidationError:
            return name
    return "*"


def _words(path: str) -> tuple[str, ...]:
    """Return the allowed words at `path` (`table.key[0]`), which takes one of a fixed set."""
    section, _, key = re.sub(r"\[[^]]*\]", "", path).rpartition(".")
    todo = [get_type_hints(_KEYS[section])[key]]
    for hint in todo:  # grows while it is walked
        if get_origin(hint) is Literal:
            return get_args(hint)
        todo += get_args(hint)
    return ()


_NAME_IN_WORDS = "at most 64 of a-z, 0-9, '_' and '-'"

_KEYS: dict[str, type[Section]] = {
    "device": DeviceSection,
    "repository": Repository,
    "serving": Serving,
    "python": Python,
    "serving.rate_limit_resources": RateLimitResourceSection,
    "grpc": Grpc,
    "grpc.tls": Tls,
    "grpc.restricted": Restriction,
    "metrics": Metrics,
    "trace": TraceSection,
    "mqtt": Mqtt,
    "cameras": CameraSection,
    "log": LogSection,
}
