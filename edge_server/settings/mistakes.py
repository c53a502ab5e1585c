"""Describes a settings value of the wrong kind: the expected kind and the given value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST_CHARACTERS = 60
# Credentials of clients and cameras stay out of the journal.
_SECRET = re.compile(r"grpc\.restricted(\[\d+\](\.value)?)?\Z")
# Up to the last @: a password may have one itself, a slash, or a space.
_LOGIN = re.compile(r"://(\S*|[^\"']*)@")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text in quotes",
    "array": "a list",
    "object": "a table",
}
_HEADER = re.compile(r"\s*\[\[?([^\[\]#]+)\]")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
_UNQUOTED = re.compile(r"[\s\"']")
_STEP = re.compile(r"[^.\[\]]+")


def without_logins(text: str) -> str:
    """Return `text` without the user names and passwords of URIs in it."""
    return _LOGIN.sub("://…@", text)


def line_of(text: str, path: str) -> int | None:
    """Return the line of TOML, from 1, with the setting at `path` (`grpc.port`), or the nearest
    table around it; None if there is neither."""
    wanted = re.sub(r"\[\d+\]", "", path)
    table, nearest, line = "", "", None
    for number, content in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(content):
            name = table = _UNQUOTED.sub("", header[1])
        elif key := _KEY.match(content):
            name = f"{table}.{_UNQUOTED.sub('', key[1])}".lstrip(".")
        else:
            continue
        if name == wanted:
            return number
        if wanted.startswith(f"{name}.") and len(name) > len(nearest):
            nearest, line = name, number
    return line


def value_mistake(text: str, table: Mapping[str, Any]) -> str:
    """Return msgspec's whole message about a flat `table`, with a value of the wrong kind."""
    message, _, location = text.partition(" - at ")
    path = location.strip("`").removeprefix("$").lstrip(".")
    if not message.startswith("Expected `"):
        return text
    return f"{path}: {in_words(message, path, table)}"


def in_words(message: str, path: str, table: Mapping[str, Any]) -> str:
    """msgspec's `message` about the value at `path` (`table.key[0]`) of `table`, and that value."""
    text = re.sub(r", got `[^`]*`\Z", "", message)
    text = re.sub(r"`([\w |]+)`", lambda found: _kind(found[1]), text)
    text = text.replace("Expected", "expected", 1)
    if _SECRET.fullmatch(path):
        return text
    return f"{text}; got {_shown(_value_at(path, table))}"


def _kind(name: str) -> str:
    return " or ".join(_KINDS.get(each, each) for each in name.split(" | ") if each != "null")


def _value_at(path: str, table: Mapping[str, Any]) -> Any:
    value: Any = table
    for step in _STEP.findall(path):
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, Sequence) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
    return value


def _shown(value: Any) -> str:
    """Return the value as TOML spells it, or nearly so, and shortened."""
    text = without_logins(json.dumps(value, default=str))
    if len(text) > _LONGEST_CHARACTERS:
        text = f"{text[:_LONGEST_CHARACTERS]}…"
    return text
