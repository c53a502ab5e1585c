"""BrokerAddress: the broker's address and the credentials for it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from edge_server.settings import Mqtt


@dataclass(frozen=True)
class BrokerAddress:
    """One broker. The files are read for every connection, so that a changed file takes effect.

    Attributes:
        host: name or address.
        port: of TCP; by custom 1883, and 8883 with TLS.
        username: None for a broker without authentication.
        password_file: holds the password; trailing line ends are ignored.
        ca_file: PEM; if set, the connection is TLS 1.2 or newer and the broker must present a
            certificate of this authority for `host`.
        cert_file: PEM; this device's own certificate, for a broker that requires one.
        key_file: PEM; its private key, without a password.
        keepalive_s: a broker that is silent for two of these intervals counts as lost.
        connect_timeout_s: for TCP and again for TLS.

    Raises:
        ValueError: a value out of range; the text names it.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    username: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    keepalive_s: int = 5
    connect_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must not be empty")
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be 1 to 65535, not {self.port}")
        if not 1 <= self.keepalive_s <= 65535:
            raise ValueError(f"keepalive_s must be 1 to 65535, not {self.keepalive_s}")
        if self.password_file is not None and self.username is None:
            raise ValueError("password_file needs a username beside it")

    @classmethod
    def of(cls, mqtt: Mqtt) -> BrokerAddress:
        """Return the address of the settings' `[mqtt]` table.

        Raises:
            SettingsError: its values contradict each other.
        """
        try:
            return cls(
                mqtt.host,
                mqtt.port,
                mqtt.username,
                _path(mqtt.password_file),
                _path(mqtt.ca_file),
                _path(mqtt.cert_file),
                _path(mqtt.key_file),
            )
        except ValueError as error:
            raise SettingsError(f"mqtt: {error}") from error

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def password(self) -> str | None:
        """Return the present contents of `password_file`.

        Raises:
            OSError: the file cannot be read.
        """
        if self.password_file is None:
            return None
        return self.password_file.read_text(encoding="utf-8").rstrip("\r\n")

    def file_faults(self) -> list[str]:
        """Return the faults of the files that each connection reads, by their settings."""
        faults = []
        try:
            self.password()
        except OSError as error:
            faults.append(
                f"mqtt.password_file: {self.password_file}: cannot be read: {error.strerror}"
            )
        except UnicodeDecodeError as error:
            faults.append(
                f"mqtt.password_file: {self.password_file}: not UTF-8 at byte {error.start}"
            )
        if self.ca_file is not None:
            try:
                ssl.create_default_context(cafile=self.ca_file)
            except ssl.SSLError:
                faults.append(f"mqtt.ca_file: {self.ca_file}: holds no certificate in PEM form")
            except OSError as error:
                faults.append(f"mqtt.ca_file: {self.ca_file}: cannot be read: {error.strerror}")
        if self.cert_file is not None:
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_cert_chain(self.cert_file, self.key_file, password="")
            except OSError as error:  # ssl.SSLError is one
                faults.append(
                    f"mqtt.cert_file, mqtt.key_file: {self.cert_file}, {self.key_file}: cannot be "
                    f"used: {error.strerror or error}; give a certificate and its key in PEM form, "
                    "without a password"
                )
        return faults


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
