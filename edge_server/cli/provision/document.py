"""Document: a provisioning file, read from a source that nobody vouches for.

A file has at most `LONGEST_BYTES`, no key that is not listed here, and no value that could mean
more than itself where it is written: no path, no option of ssh, no second line of a keyfile.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import ssl
import stat
from typing import TYPE_CHECKING, Annotated

import msgspec

from edge_server.errors import SettingsError
from edge_server.settings import CameraSection  # noqa: TC001 - msgspec reads the annotation
from edge_server.settings.mistakes import value_mistake
from edge_server.settings.sections import Name, Port, Section
from edge_server.settings.text_file import parse_toml

if TYPE_CHECKING:
    from pathlib import Path

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
    check_length(data, str(path))
    return data


def check_length(data: bytes, source: str) -> None:
    """Raise a SettingsError if `data` is longer than any provisioning file."""
    if len(data) > LONGEST_BYTES:
        raise SettingsError(f"{source}: is longer than {LONGEST_BYTES // 1024} KiB")


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
