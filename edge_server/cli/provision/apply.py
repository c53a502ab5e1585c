"""Apply: what a provisioning file changes on the device, so that a power cut leaves no half of it.

All files are written and checked in a folder beside the settings first; then each replaces its
predecessor, and the record that the file was applied comes last. Without the record the next boot
applies the file again.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tomli_w

from edge_server.errors import SettingsError
from edge_server.mqtt.broker import faults_of
from edge_server.process.disk import atomic_write
from edge_server.settings import CameraSection, read_settings
from edge_server.settings.text_file import parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.cli.provision.document import Document

_HEADER = """\
# Written by `edge-server provision`, which keeps values and no comments; the file before is
# {before}. The next provisioning file changes only the tables that it has.
"""
# What a file says of the broker; whatever else [mqtt] has, no file can say, so it stays.
_CONNECTION = frozenset(
    ("host", "port", "username", "password_file", "ca_file", "cert_file", "key_file", "insecure")
)


@dataclass(frozen=True)
class Places:
    """Where the device keeps what a provisioning file sets.

    Attributes:
        config: the daemon's settings; secrets lie beside it.
        data: the data partition.
        group: may read secrets; None leaves them to their owner.
    """

    config: Path
    data: Path
    group: str | None

    @property
    def record(self) -> Path:
        """The digest of the file that was applied last."""
        return self.data / "identity/provisioned"

    @property
    def serial(self) -> Path:
        """The greatest serial of all files, and the digest of the newest that was begun."""
        return self.data / "identity/provisioned-serial"


def begun(places: Places) -> tuple[int, str]:
    """Return the greatest serial that was applied, 0 for none, and the digest of the file of which
    the application was begun last.

    Raises:
        SettingsError: the file that has them is damaged.
    """
    try:
        serial, digest = places.serial.read_text("ascii").split()
        return int(serial), digest
    except FileNotFoundError:
        return 0, ""
    except ValueError as error:
        raise SettingsError(
            f"{places.serial}: holds no serial and digest; who is logged in may remove it"
        ) from error


def apply(document: Document, digest: str, places: Places) -> list[str]:
    """Change the device as `document` says; return a line for each change.

    Raises:
        SettingsError: the daemon's settings with it would be faulty; nothing was changed.
        OSError: a file cannot be written; applying again completes it.
    """
    lines = []
    with _staging(places.config.parent) as staging:
        secrets = _write_secrets(document, staging)
        settings = _merged(document, places)
        _check(settings, staging, places)
        if document.file is not None:
            # First of all: an older file counts no more, and after a power cut this one still does.
            serial = max(document.file.serial, begun(places)[0])
            _put(places.serial, f"{serial} {digest}\n".encode(), 0o644)
        for name, mode in secrets.items():
            _put(places.config.with_name(name), (staging / name).read_bytes(), mode, places.group)
            lines.append(str(places.config.with_name(name)))
    if document.ssh is not None:
        text = "".join(f"{key}\n" for key in document.ssh.keys)
        _put(places.data / "ssh/edge", text.encode(), 0o644)
        lines.append(f"{len(document.ssh.keys)} ssh keys for user edge")
    if document.wifi is not None:
        text = _keyfile(document.wifi.ssid, document.wifi.password)
        _put(places.data / "network/provisioned.nmconnection", text.encode(), 0o600)
        lines.append("a Wi-Fi network, from the next boot on")
    before = places.config.with_name("config.toml.before")
    text = _HEADER.format(before=before) + tomli_w.dumps(settings)
    if not places.config.exists() or places.config.read_text() != text:
        if places.config.exists():
            _put(before, places.config.read_bytes(), 0o644)
        _put(places.config, text.encode(), 0o644)
        lines.append(str(places.config))
    if document.device is not None:
        _put(places.data / "identity/device-id", f"{document.device.id}\n".encode(), 0o644)
        lines.append(f"device id {document.device.id}")
    _put(places.record, f"{digest}\n".encode(), 0o644)
    return lines


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    for left in folder.glob(".provision-*"):
        shutil.rmtree(left)
    staging = Path(tempfile.mkdtemp(prefix=".provision-", dir=folder))
    try:
        yield staging
    finally:
        shutil.rmtree(staging)


def _write_secrets(document: Document, staging: Path) -> dict[str, int]:
    """Write the files that the settings name; return their names and modes."""
    mqtt = document.mqtt
    if mqtt is None:
        return {}
    contents = {
        "mqtt_password": (mqtt.password, 0o640),
        "mqtt_ca.pem": (mqtt.ca, 0o644),
        "mqtt.crt": (mqtt.certificate, 0o644),
    }
    written = {}
    for name, (text, mode) in contents.items():
        if text is not None:
            (staging / name).write_text(f"{text.rstrip()}\n" if mode == 0o644 else text)
            written[name] = mode
    return written


def _merged(document: Document, places: Places) -> dict[str, Any]:
    """Return the present settings with those of `document` laid over them."""
    settings: dict[str, Any] = {}
    if places.config.exists():
        read_settings(places.config, {})
        settings = parse_toml(places.config.read_text("utf-8").removeprefix("\ufeff"))
    if document.device is not None:
        settings["device"] = {**settings.get("device", {}), "id": document.device.id}
    if (mqtt := document.mqtt) is not None:
        before = settings.get("mqtt", {}).items()
        settings["mqtt"] = {key: value for key, value in before if key not in _CONNECTION}
        settings["mqtt"] |= {"host": mqtt.host, "port": mqtt.port}
        if mqtt.username is not None:
            settings["mqtt"]["username"] = mqtt.username
        if mqtt.insecure:
            settings["mqtt"]["insecure"] = True
        for name, key, there in (
            ("mqtt_password", "password_file", mqtt.password),
            ("mqtt_ca.pem", "ca_file", mqtt.ca),
            ("mqtt.crt", "cert_file", mqtt.certificate),
        ):
            if there is not None:
                settings["mqtt"][key] = str(places.config.with_name(name))
        if mqtt.certificate is not None:
            settings["mqtt"]["key_file"] = str(places.data / "identity/device.key")
    if document.cameras:
        cameras = {name: _chosen(camera) for name, camera in document.cameras.items()}
        settings["cameras"] = {**settings.get("cameras", {}), **cameras}
    return settings


def _chosen(camera: CameraSection) -> dict[str, Any]:
    """Return the keys of `camera` that are not defaults."""
    defaults = msgspec.to_builtins(CameraSection(uri=""))
    return {k: v for k, v in msgspec.to_builtins(camera).items() if v != defaults[k]}


def _check(settings: dict[str, Any], staging: Path, places: Places) -> None:
    """Raise a SettingsError for what `edge-server check` would refuse of settings and secrets."""
    trial = staging / "config.toml"
    trial.write_text(tomli_w.dumps(settings), "utf-8")
    mqtt = read_settings(trial, {}).mqtt
    if mqtt is None:
        return
    # The secrets are still in the folder, those that are not new in their place.
    moved = {
        name: str(staging / Path(path).name)
        for name in ("password_file", "ca_file", "cert_file")
        if (path := getattr(mqtt, name)) and (staging / Path(path).name).exists()
    }
    if faults := faults_of(msgspec.structs.replace(mqtt, **moved)):
        said = "; ".join(faults).replace(str(staging), str(places.config.parent))
        raise SettingsError(f"the provisioning file gives settings that cannot be used: {said}")


def _put(path: Path, data: bytes, mode: int, group: str | None = None) -> None:
    """Durably write the file with exactly `mode`, where its content is not that already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != data:
        atomic_write(path, data, mode=mode)
    if group is not None:
        shutil.chown(path, group=group)
    path.chmod(mode)


def _keyfile(ssid: str, password: str | None) -> str:
    """Return NetworkManager's connection; the network's name as numbers, which need no quotes."""
    lines = [
        "[connection]",
        "id=provisioned",
        "uuid=7b0e6f0e-0f0a-5e0c-9d55-3f2c4a1e7a10",
        "type=wifi",
        "",
        "[wifi]",
        f"ssid={''.join(f'{byte};' for byte in ssid.encode())}",
        "",
    ]
    if password is not None:
        escaped = password.replace("\\", "\\\\").replace(" ", "\\s")
        lines += ["[wifi-security]", "key-mgmt=wpa-psk", f"psk={escaped}", ""]
    return "\n".join(lines)
