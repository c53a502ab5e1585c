"""The daemon's own configuration: TOML → frozen structs; an error names file, key and remedy."""

from __future__ import annotations

import difflib
import ipaddress
import re
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from edge_server.errors import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_NAME = r"^[a-z0-9_-]{1,64}$"
Name = Annotated[str, msgspec.Meta(pattern=_NAME)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: immutable, and a key that nobody knows is an error."""


def _host_name() -> str:
    """The host's name as a topic may spell it."""
    return re.sub(r"[^a-z0-9_-]+", "-", socket.gethostname().lower())[:64] or "edge"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Device(Section, frozen=True):
    """`[device]`: who this appliance is; its id is part of every topic."""

    id: Name = msgspec.field(default_factory=_host_name)


class Repository(Section, frozen=True):
    """`[repository]`: where the models are, and whether changes are followed.

    `none` loads at start and never again; `poll` and `explicit` come with hot reload.
    """

    paths: tuple[str, ...] = ("models",)
    mode: Literal["none"] = "none"


class Grpc(Section, frozen=True):
    """`[grpc]`: where the Triton protocol is served; port 0 takes a free one.

    `insecure` allows another address than the loopback without TLS, which is not there yet.
    """

    host: str = "127.0.0.1"
    port: Port = 8001
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                f"{self.host} is beyond the loopback, where anybody could ask and listen in plain "
                "text; say insecure = true (--grpc-insecure) if that is meant"
            )


class Mqtt(Section, frozen=True):
    """`[mqtt]`: the broker; without this table nothing is published."""

    host: str
    port: Port = 1883
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None


class Camera(Section, frozen=True):
    """`[cameras.NAME]`: where frames come from and which model sees lanes in them."""

    uri: str
    model: str = "lane_detection"


class Log(Section, frozen=True):
    """`[log]`: `verbose` 1 and more adds debug lines."""

    verbose: Annotated[int, msgspec.Meta(ge=0)] = 0


class Settings(Section, frozen=True):
    """Everything that can be chosen."""

    device: Device = Device()
    repository: Repository = Repository()
    grpc: Grpc = Grpc()
    mqtt: Mqtt | None = None
    cameras: dict[Name, Camera] = {}
    log: Log = Log()


def read_settings(path: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """The settings in `path`, with `overrides` (the same nested form) laid over them.

    Relative paths in the file are relative to the working directory, as on the command line.

    Raises:
        SettingsError: unreadable, not TOML, an unknown key or a value that does not fit.
    """
    below = {} if path is None else _read_toml(path)
    merged = _merge(below, overrides)
    if (fault := _fault(merged)) is None:
        return msgspec.convert(merged, Settings, strict=True)
    # What the file alone would be told for is not the command line's doing.
    blamed = path if path is not None and fault == _fault(below) else "command line"
    raise SettingsError(f"{blamed}: {fault}")


def _fault(table: Mapping[str, Any]) -> str | None:
    """What is wrong with `table`; None where it is good."""
    try:
        msgspec.convert(table, Settings, strict=True)
    except msgspec.ValidationError as error:
        cameras = table.get("cameras")
        return _explain(str(error), cameras if isinstance(cameras, dict) else ())
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
    """`below` with `above` laid over it, key by key.

    A value that stands where `above` has a table stays, to be told as the mistake it is.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key, {})
        if not isinstance(value, dict):
            merged[key] = value
        elif isinstance(old, dict):
            merged[key] = _merge(old, value)
    return merged


def _explain(text: str, camera_names: Iterable[str]) -> str:
    """msgspec's message as `grpc.port: what is wrong`, with the nearest key for an unknown one."""
    message, _, location = text.partition(" - at ")
    if location.startswith("`key`"):
        names = ", ".join(name for name in camera_names if not re.search(_NAME, name))
        return f"cameras: a name has at most 64 of a-z, 0-9, '_' and '-'; got: {names}"
    message = message.replace("`object`", "a table")
    path = location.strip("`").removeprefix("$").lstrip(".")
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        key = unknown[1]
        known = _KEYS.get(path.partition("[")[0], Settings).__struct_fields__
        nearest = difflib.get_close_matches(key, known, n=1)
        hint = f'did you mean "{nearest[0]}"?' if nearest else f"known: {', '.join(known)}"
        message, path = f"unknown key; {hint}", f"{path}.{key}".lstrip(".")
    # msgspec does not say which of the cameras it means.
    return f"{path.replace('[...]', '.*')}: {message}" if path else message


_KEYS: dict[str, type[Section]] = {
    "device": Device,
    "repository": Repository,
    "grpc": Grpc,
    "mqtt": Mqtt,
    "cameras": Camera,
    "log": Log,
}
