"""All settings, and reading them: TOML → frozen structs; an error names file, key and remedy."""

from __future__ import annotations

import difflib
import re
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from edge_server.errors import SettingsError
from edge_server.settings.mistakes import in_words, line_of, without_logins
from edge_server.settings.sections import (
    NAME,
    POWER,
    CameraSection,
    DeviceSection,
    EventsSection,
    LaneDeparture,
    LogSection,
    Metrics,
    Mqtt,
    Name,
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
from edge_server.settings.text_file import TomlError, parse_toml, read_text_file
from edge_server.settings.transport import Access, Grpc, Http, Tls

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
    if location.startswith("`key`"):
        names = ", ".join(name for name in cameras if not re.search(NAME, name))
        return without_logins(f"cameras: a name has {_NAME_IN_WORDS}; got: {names}")
    message = message.replace(
        f"Expected `str` matching regex {NAME!r}", f"expected {_NAME_IN_WORDS}"
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
    if "[...]" in path:
        path = path.replace("[...]", f".{_first_faulty(cameras)}")
    if message.lower().startswith("expected `") or message.startswith(f"expected {_NAME_IN_WORDS}"):
        message = in_words(message, path, table)
    # Any key or value may be a URI in the wrong place.
    return without_logins(f"{path}: {message}" if path else message)


def _first_faulty(cameras: Mapping[str, Any]) -> str:
    """Return the first camera with a fault: msgspec's message does not name the camera."""
    for name, table in cameras.items():
        try:
            msgspec.convert(table, CameraSection, strict=True)
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
