"""`edge-server provision`: which files are accepted, and what one changes, whole or not at all.

All files are written and checked in a folder beside the settings first; then each replaces its
predecessor, and the record that the file was applied comes last. Without the record the next boot
applies the file again.
"""

from __future__ import annotations

import base64
import binascii
import grp
import hashlib
import os
import re
import shutil
import ssl
import stat
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tomli_w

from edge_server.errors import SettingsError, Unavailable
from edge_server.mqtt.broker import faults_of
from edge_server.process.disk import atomic_write
from edge_server.settings import CameraSection, read_settings
from edge_server.settings.read import parse_toml, read_text_file, value_mistake
from edge_server.settings.sections import Name, Port, Section

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_GROUP = "edge-server"
_OPENSSL_S = 10
LONGEST_BYTES = 64 * 1024
_SIGNATURE = re.compile(rb"# signature: ([A-Za-z0-9+/]{86}==)\r?\n?\Z")
_SSH_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)
# One line, without a control character.
_Line = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,256}\Z")]
_Host = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]{0,252}\Z")]
_Ssid = Annotated[str, msgspec.Meta(min_length=1)]
_LONGEST_SSID_BYTES = 32  # IEEE 802.11
# What WPA allows: printable ASCII, or the key itself in hexadecimal digits.
_WifiPassword = Annotated[str, msgspec.Meta(pattern=r"^(?:[\x20-\x7e]{8,63}|[0-9A-Fa-f]{64})\Z")]
_Pem = Annotated[str, msgspec.Meta(max_length=32 * 1024)]


class _File(Section, frozen=True):
    """`[file]`: which of several signed files counts, and where.

    Attributes:
        serial: greater than that of every file before; a date does: 20260131.
        devices: the ids of the devices that it is for; without them it fits all.
    """

    serial: Annotated[int, msgspec.Meta(ge=1, le=10**15)]
    devices: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)] = ()


class _Device(Section, frozen=True):
    """`[device]`."""

    id: Name


class _Broker(Section, frozen=True):
    """`[mqtt]`: as in the daemon's settings, but with contents in place of file names.

    Attributes:
        ca: PEM text; the authority of the broker's certificate; enables TLS.
        certificate: PEM text; of this device's own key, which signed `device.csr`.
    """

    host: _Host
    port: Port = 1883
    username: _Line | None = None
    password: _Line | None = None
    ca: _Pem | None = None
    certificate: _Pem | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.password is not None and self.username is None:
            raise ValueError("password needs a username beside it")
        if self.certificate is not None and self.ca is None:
            raise ValueError("certificate needs ca: without it there is no TLS")
        for name, pem in (("ca", self.ca), ("certificate", self.certificate)):
            if pem is not None:
                _check_certificate(name, pem)


class _Ssh(Section, frozen=True):
    """`[ssh]`: the public keys that may log in as user edge, all of them."""

    keys: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]

    def __post_init__(self) -> None:
        for key in self.keys:
            _check_ssh_key(key)


class _Wifi(Section, frozen=True):
    """`[wifi]`: a network with WPA2; without a password an open one."""

    ssid: _Ssid
    password: _WifiPassword | None = None

    def __post_init__(self) -> None:
        if len(self.ssid.encode()) > _LONGEST_SSID_BYTES:
            raise ValueError(f"ssid: has more than {_LONGEST_SSID_BYTES} bytes of UTF-8")


class Document(Section, frozen=True):
    """A provisioning file; a table that is missing leaves what the device has.

    Attributes:
        cameras: as in the daemon's settings; those of the same name are replaced.
    """

    file: _File | None = None
    device: _Device | None = None
    mqtt: _Broker | None = None
    ssh: _Ssh | None = None
    wifi: _Wifi | None = None
    cameras: dict[Name, CameraSection] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, camera in self.cameras.items():
            if camera.credentials_file is not None:
                raise ValueError(
                    f"cameras.{name}.credentials_file: a provisioning file names no files of the "
                    "device; add it to the settings over ssh"
                )


class SignedText:
    """The bytes of a provisioning file, and the signature in its last line.

    Attributes:
        text: what is signed, and read.
        signature: Ed25519, 64 bytes; None where the file has none.
        digest: SHA-256 of `text`, in hexadecimal digits.
    """

    def __init__(self, data: bytes) -> None:
        found = _SIGNATURE.search(data)
        self.text = data if found is None else data[: found.start()]
        self.signature = None if found is None else base64.b64decode(found[1])
        self.digest = hashlib.sha256(self.text).hexdigest()


def read_file(path: Path) -> bytes:
    """Return the file's bytes.

    Raises:
        SettingsError: it is no regular file, longer than `LONGEST_BYTES`, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SettingsError(f"{path}: is no regular file")
            data = file.read(LONGEST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > LONGEST_BYTES:
        raise SettingsError(f"{path}: is longer than {LONGEST_BYTES // 1024} KiB")
    return data


def parse(text: bytes, source: str) -> Document:
    """Return the document in `text`; `source` is its name in errors.

    Raises:
        SettingsError: it is not TOML, has an unknown key, or a value that is not allowed.
    """
    try:
        table = parse_toml(text.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source}: not UTF-8 text at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        # ValueError is that of TOML, and of a number with too many digits.
        raise SettingsError(f"{source}: not TOML: {str(error)[:200]}") from error
    try:
        return msgspec.convert(table, Document, strict=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_without_values(str(error), table)}") from error


def _without_values(message: str, table: dict[str, object]) -> str:
    """Return msgspec's message; values are left out where they may be secrets."""
    _, _, location = message.partition(" - at ")
    secret = re.search(r"password|username|keys|\$\.(?:wifi|mqtt|ssh)`", location)
    return message if secret else value_mistake(message, table)


def _check_certificate(name: str, pem: str) -> None:
    if "PRIVATE KEY" in pem:
        raise ValueError(f"{name}: holds a private key, which no provisioning file may carry")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{name}: holds no certificate in PEM form") from error


def _check_ssh_key(key: str) -> None:
    kind, _, rest = key.partition(" ")
    blob, _, comment = rest.partition(" ")
    try:
        raw = base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    # The blob begins with the length and the name of its kind.
    begin = len(kind).to_bytes(4, "big") + kind.encode(errors="replace")
    if kind not in _SSH_TYPES or not raw.startswith(begin) or len(raw) < len(begin) + 32:
        raise ValueError("ssh.keys: give lines of a .pub file: ssh-ed25519 AAAA… name")
    if not comment.isprintable() or len(comment) > 128:
        raise ValueError("ssh.keys: a key's comment is one line of up to 128 printable characters")


_HEADER = """\
# Written by `edge-server provision`, which keeps values and no comments; the file before is
# {before}. The next provisioning file changes only the tables that it has.
"""
# By the field of `[mqtt]`: the file that gets its text, the setting that names the file, its mode.
_SECRETS = {
    "password": ("mqtt_password", "password_file", 0o640),
    "ca": ("mqtt_ca.pem", "ca_file", 0o644),
    "certificate": ("mqtt.crt", "cert_file", 0o644),
}
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
    the application was begun last."""
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
    written = {}
    for field, (name, _, mode) in _SECRETS.items():
        text: str | None = getattr(document.mqtt, field, None)
        if text is not None:
            (staging / name).write_text(f"{text.rstrip()}\n" if mode == 0o644 else text)
            written[name] = mode
    return written


def _merged(document: Document, places: Places) -> dict[str, Any]:
    """Return the present settings with those of `document` laid over them."""
    settings: dict[str, Any] = {}
    if places.config.exists():
        read_settings(places.config, {})
        settings = parse_toml(read_text_file(places.config))
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
        for field, (name, key, _) in _SECRETS.items():
            if getattr(mqtt, field) is not None:
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
        for _, name, _ in _SECRETS.values()
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


def provision(arguments: argparse.Namespace) -> Iterator[str]:
    """Apply a provisioning file; yield a line for each change."""
    places = Places(arguments.config, arguments.data, _group())
    source = str(arguments.file)
    signed = SignedText(read_file(arguments.file))
    if recorded(places) == signed.digest:
        yield f"{source}: applied before; nothing changed"
        return
    refuse_unless_trusted(
        signed,
        source,
        places,
        key=arguments.key if arguments.key.exists() else None,
        replace=arguments.replace,
    )
    document = parse(signed.text, source)
    refuse_unless_newer(document, signed.digest, source, places, replace=arguments.replace)
    try:
        lines = apply(document, signed.digest, places)
    except OSError as error:
        where = error.filename or f"{places.config.parent} or {places.data}"
        raise Unavailable(
            f"{where}: cannot be written: {error.strerror}; {source} is not applied whole: apply "
            "it again as root, where there is room"
        ) from error
    yield from (f"{source}: {line}" for line in lines)


def recorded(places: Places) -> str:
    """Return the digest of the file that was applied last; empty if none was."""
    return _text_of(places.record)


def refuse_unless_trusted(
    signed: SignedText,
    source: str,
    places: Places,
    *,
    key: Path | None,
    replace: bool,
) -> None:
    """Return if the file may change this device.

    Args:
        key: the public key in the image, if it has one.
        replace: who is logged in wants it to follow another file.

    Raises:
        SettingsError: it may not; the text says why.
    """
    if key is not None:
        if signed.signature is None:
            raise SettingsError(
                f"{source}: is not signed, and this image has a key ({key}); docs/flash.md shows "
                "how to sign it"
            )
        if not _is_signed(signed.text, signed.signature, key):
            raise SettingsError(
                f"{source}: the signature is not that of {key}: another key signed it, or the file "
                "was changed since"
            )
    elif recorded(places) and not replace:
        raise SettingsError(
            f"{source}: this device is provisioned already, with another file; who is logged in "
            f"may replace it: sudo edge-server provision --replace {source}"
        )


def refuse_unless_newer(
    document: Document, digest: str, source: str, places: Places, *, replace: bool
) -> None:
    """Return if a trusted file is for this device, and no older than what the device has.

    Raises:
        SettingsError: it is not; the text says why.
    """
    greatest, last = begun(places)
    if digest == last:
        # A power cut interrupted it, perhaps after the change of the device's id.
        return
    file = document.file
    if (
        file is not None
        and file.devices
        and (own := _text_of(places.data / "identity/device-id")) not in file.devices
    ):
        raise SettingsError(
            f"{source}: is for {', '.join(file.devices)[:200]}; this device is {own or 'unnamed'}"
        )
    if replace or not (greatest or recorded(places)):
        return
    if file is None:
        raise SettingsError(
            f"{source}: this device is provisioned already, and a file without a serial may be an "
            f"old one; sign it with [file] serial = {greatest + 1} or above"
        )
    if file.serial <= greatest:
        raise SettingsError(
            f"{source}: serial {file.serial} is not above {greatest}, which was here; who is "
            f"logged in may go back: sudo edge-server provision --replace {source}"
        )


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""


def _is_signed(text: bytes, signature: bytes, key: Path) -> bool:
    """Ask openssl, which every image has; the package that could do it here is not part of ours."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"text": text, "signature": signature}
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        command = ("openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(key), "-rawin")
        try:
            done = subprocess.run(  # noqa: S603 - fixed words, and paths of our own
                [*command, "-in", f"{folder}/text", "-sigfile", f"{folder}/signature"],
                capture_output=True,
                timeout=_OPENSSL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SettingsError(f"openssl cannot check the signature: {error}") from error
    return done.returncode == 0


def _group() -> str | None:
    """Return the daemon's group; None where the package did not make it."""
    try:
        return grp.getgrnam(_GROUP).gr_name
    except KeyError:
        return None
