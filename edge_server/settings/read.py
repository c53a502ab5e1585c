"""All settings, and reading them: TOML → frozen structs; an error names file, key and remedy."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import select
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from edge_server.errors import SettingsError
from edge_server.settings.sections import (
    CHANNEL,
    NAME,
    POWER,
    REGION,
    CameraSection,
    ChannelSection,
    DeviceSection,
    EventsSection,
    LaneDeparture,
    LogSection,
    Metrics,
    Mqtt,
    Name,
    NetworkSection,
    Power,
    Python,
    RecorderSection,
    Repository,
    Section,
    Serving,
    TraceSection,
    TracingSection,
    Vehicle,
    applied_by,
    is_loopback,
)
from edge_server.settings.transport import Access, Grpc, Http, Tls

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME_IN_WORDS = "at most 64 of a-z, 0-9, '_' and '-'"


class Settings(Section, frozen=True):
    """All settings of the daemon."""

    device: DeviceSection = DeviceSection()
    repository: Repository = Repository()
    serving: Serving = Serving()
    python: Python = Python()
    grpc: Grpc = Grpc()
    http: Http = Http()
    access: Access = Access()
    metrics: Metrics = Metrics()
    trace: Annotated[TraceSection, applied_by("trace")] = TraceSection()
    tracing: TracingSection = TracingSection()
    mqtt: Annotated[Mqtt | None, applied_by("broker")] = None
    cameras: Annotated[dict[Name, CameraSection], applied_by("cameras")] = msgspec.field(
        default_factory=dict
    )
    vehicle: Vehicle = Vehicle()
    lane_departure: LaneDeparture = LaneDeparture()
    events: EventsSection = EventsSection()
    recorder: RecorderSection = RecorderSection()
    power: Annotated[Power, applied_by(POWER)] = Power()
    log: Annotated[LogSection, applied_by("log")] = LogSection()

    def __post_init__(self) -> None:
        grpc, http, metrics = self.grpc, self.http, self.metrics
        addresses = (
            ("grpc", grpc.enabled, grpc.port),
            ("http", http.enabled, http.port),
            ("metrics", metrics.enabled, metrics.port),
        )
        ports = {name: port for name, enabled, port in addresses if enabled and port}
        for (one, port), (other, its_port) in combinations(ports.items(), 2):
            if port == its_port:
                raise ValueError(
                    f"{one}.port and {other}.port are both {port}; choose another for one of them "
                    f"(--{one}-port, --{other}-port)"
                )

        if self.trace.rate == 0 and not self.tracing.enabled:
            raise ValueError(
                "trace.rate must be non-zero; 0 is for OpenTelemetry (--trace-config "
                "mode=opentelemetry), which then traces only requests of traced callers"
            )

    def without_effect(self) -> list[str]:
        """Return a line for each setting that has no effect beside the others."""
        lines = []
        if self.repository.load and self.repository.mode != "explicit":
            lines.append("repository.load: no effect: every model is loaded in mode 'none'")
        if self.serving.rate_limit_resources and self.serving.rate_limit == "off":
            lines.append(
                "serving.rate_limit_resources: no effect: rate_limit is off "
                "(--rate-limit=execution_count)"
            )
        for name, each in (("grpc", self.grpc), ("http", self.http)):
            if (
                each.enabled
                and self.grpc.control == "everywhere"
                and not (is_loopback(each.host) or each.tls.mutual or self.access.tokens_file)
            ):
                lines.append(
                    f'grpc.control: "everywhere": no effect on {name}, as {each.host} is beyond '
                    "the loopback: control calls there need tokens ([access] tokens_file) or "
                    f"client certificates (mutual in [{name}.tls])"
                )
        for name, tls in (("grpc", self.grpc.tls), ("http", self.http.tls)):
            if tls != Tls() and not tls.on:
                flag = " (--grpc-use-ssl=true)" if name == "grpc" else ""
                lines.append(f"{name}.tls: no effect: neither enabled nor mutual{flag}")
            elif tls.client_ca and not tls.mutual:
                lines.append(
                    f"{name}.tls.client_ca: no effect: mutual is false, no certificate is required"
                )
        if self.trace.level != ("OFF",) and not self.trace.file and not self.tracing.enabled:
            lines.append("trace.level: no effect: no trace.file (--trace-config triton,file=FILE)")
        if self.tracing != TracingSection() and not self.tracing.enabled:
            lines.append("tracing: no effect: enabled is false (--trace-config mode=opentelemetry)")
        return lines


def read_settings(path: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Return the settings in `path`, with `overrides` (the same nested form) laid over them.

    Relative paths in the file are relative to the working directory, as on the command line.

    Raises:
        SettingsError: the file is unreadable, empty or not TOML, or has an unknown key or a bad
            value.
    """
    text = "" if path is None else _read_text(path)
    below = {} if path is None else _parse(path, text)
    merged = _merge(below, overrides)
    if (fault := _fault(merged)) is None:
        return msgspec.convert(merged, Settings, strict=True)
    # A fault that the file has on its own is not the command line's.
    if path is None or fault != _fault(below):
        raise SettingsError(f"command line: {fault}")
    line = line_of(text, fault.partition(":")[0])
    raise SettingsError(f"{path}: {fault}" + (f" (line {line})" if line else ""))


def _fault(table: Mapping[str, Any]) -> str | None:
    """Return the fault of `table`; None if it is valid."""
    try:
        msgspec.convert(table, Settings, strict=True)
    except msgspec.ValidationError as error:
        return _explain(str(error), table)
    if (place := _nul_in(table)) is not None:
        return f"{place}: holds the character NUL, which no path, address or name may have"
    return None


def _nul_in(value: Any, place: str = "") -> str | None:
    """Return where a text of `value` holds NUL, which no call of the system takes; None if none
    does."""
    if isinstance(value, str):
        return place if "\0" in value else None
    if isinstance(value, dict):
        below = [(f"{place}.{key}".lstrip("."), each) for key, each in value.items()]
    else:
        below = [(place, each) for each in value] if isinstance(value, list | tuple) else []
    found = (_nul_in(each, name) for name, each in below)
    return next((name for name in found if name is not None), None)


def _read_text(path: Path) -> str:
    try:
        text = read_text_file(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text at byte {error.start}") from error
    if not text and path.is_file():
        # TOML allows it; a writer at work, a full disk and lost power leave it behind, too.
        raise SettingsError(
            f"{path}: is empty, as a file that was cut short is; write it again, or a comment into "
            "it for the defaults"
        )
    return text


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except TomlError as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
    except ValueError as error:
        # Python converts no more than 4300 digits.
        raise SettingsError(f"{path}: not TOML for settings: a number is too long") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: not TOML for settings: nested too deep") from error


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
    if location.startswith("`key`") and "$.repository.channels" in location:
        return f"repository.channels: a name has {_NAME_IN_WORDS}"
    if location.startswith("`key`") and "$.cameras" not in location:
        table_name = location.partition("`$.")[2].rstrip("`")
        known = next(get_args(t) for t in types_in(type_of(table_name)) if get_origin(t) is Literal)
        key = message.removeprefix("Invalid enum value ").strip("'")
        return without_logins(f"{table_name}.{key}: unknown key; known: {', '.join(known)}")
    if location.startswith("`key`"):
        networks = [each.get("networks") for each in cameras.values() if isinstance(each, dict)]
        of_networks = [name for each in networks if isinstance(each, dict) for name in each]
        names = ", ".join(n for n in (*cameras, *of_networks) if not re.search(NAME, n))
        return without_logins(f"cameras: a name has {_NAME_IN_WORDS}; got: {names}")
    message = message.replace(
        f"Expected `str` matching regex {NAME!r}", f"expected {_NAME_IN_WORDS}"
    ).replace(f"Expected `str` matching regex {REGION!r}", 'expected "road", or x,y,width,height')
    message = message.replace(
        f"Expected `str` matching regex {CHANNEL!r}", "expected oci://REGISTRY/REPOSITORY:TAG"
    )
    path = location.strip("`").removeprefix("$").lstrip(".")
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        key = unknown[1]
        known = _section_in(type_of(path)).__struct_fields__
        nearest = difflib.get_close_matches(key, known, n=1)
        hint = f'did you mean "{nearest[0]}"?' if nearest else f"known: {', '.join(known)}"
        message, path = f"unknown key; {hint}", f"{path}.{key}".lstrip(".")
    elif missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        message, path = "is missing, and has no default", f"{path}.{missing[1]}"
    elif message.startswith("Invalid enum value "):
        got = message.removeprefix("Invalid enum value ")
        words = next(get_args(t) for t in types_in(type_of(path)) if get_origin(t) is Literal)
        message = f"expected one of {', '.join(words)}; got {got}"
        if ".restricted[" in path:  # Triton's text
            what = "api" if path.startswith("http") else "protocol"
            message = f"unknown restricted {what} {got}; known: {', '.join(words)}"
    if path.startswith("repository.channels[...]"):
        name = _first_faulty(table["repository"]["channels"], ChannelSection)
        path = path.replace("[...]", f".{name}", 1)
    if "[...]" in path and path.startswith("cameras"):
        camera = _first_faulty(cameras, CameraSection)
        path = path.replace("[...]", f".{camera}", 1)
        if "[...]" in path:
            network = _first_faulty(cameras[camera]["networks"], NetworkSection)
            path = path.replace("[...]", f".{network}", 1)
    if message.lower().startswith("expected `") or message.startswith(f"expected {_NAME_IN_WORDS}"):
        message = in_words(message, path, table)
    # Any key or value may be a URI in the wrong place.
    return without_logins(f"{path}: {message}" if path else message)


def _first_faulty(tables: Mapping[str, Any], section: type[Section]) -> str:
    """Return the first table with a fault: msgspec's message does not name it."""
    for name, table in tables.items():
        try:
            msgspec.convert(table, section, strict=True)
        except msgspec.ValidationError:
            return name
    return "*"


def type_of(path: str) -> Any:
    """Return the type hint of the setting at `path`: `grpc.port`, `cameras[...].uri`."""
    hint: Any = Settings
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        hint = get_type_hints(_section_in(hint))[name] if name else hint
    return hint


def types_in(hint: Any) -> list[Any]:
    """Return `hint` and all types that it is made of."""
    return [hint, *(part for each in get_args(hint) for part in types_in(each))]


def _section_in(hint: Any) -> type[Section]:
    return next(
        part for part in types_in(hint) if isinstance(part, type) and issubclass(part, Section)
    )


LONGEST_BYTES = 16 * 2**20
# A pipe (`--config <(...)`) has this long to deliver.
WAIT_S = 5.0

TomlError = tomllib.TOMLDecodeError


def read_text_file(path: str | os.PathLike[str], wait_s: float = WAIT_S) -> str:
    """Return the contents, without the byte order mark that some editors put at the begin.

    Returns or raises within about `wait_s`, also for a pipe without a writer and a device without
    an end.

    Raises:
        OSError: the file cannot be read, is longer than `LONGEST_BYTES`, or its writer is late.
        UnicodeDecodeError: it is not UTF-8.
    """
    until = time.monotonic() + wait_s
    # O_NONBLOCK: the open of a pipe must not wait for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        data = bytearray()
        while poll.poll(max(0.0, 1e3 * (until - time.monotonic()))):
            if not (piece := os.read(file, 2**20)):
                return data.decode("utf-8").removeprefix("\ufeff")
            data += piece
            if len(data) > LONGEST_BYTES:
                raise OSError(errno.EFBIG, f"it is longer than {LONGEST_BYTES // 2**20} MiB")
        raise OSError(errno.ETIMEDOUT, f"it is a pipe, and its writer is late by {wait_s:g} s")
    finally:
        os.close(file)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of `text`.

    Raises:
        TomlError, a ValueError: it is not TOML.
        ValueError: a number has more digits than Python converts.
        RecursionError: it is nested too deep.
    """
    table: dict[str, Any] = tomllib.loads(text)
    return table


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
