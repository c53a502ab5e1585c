"""The certificates of the TCP side, read and tried before anyone depends on them."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from edge_server.settings import Tls

# Its group may read it (Debian's ssl-cert), nobody else may do anything.
_TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """What clients see, and what a client must show where `tls` is mutual.

    Raises:
        SettingsError: a file is missing, unreadable, no PEM, open to everyone, or does not fit
            the others; the text names it and the remedy.
    """
    key_path = Path(tls.key)
    certificate = _read("grpc.tls.certificate", Path(tls.certificate))
    key = _read("grpc.tls.key", key_path)
    mode = stat.S_IMODE(key_path.stat().st_mode)
    if mode & _TOO_OPEN:
        raise SettingsError(
            f"grpc.tls.key: {tls.key}: others may read or change it (mode {mode:o}): chmod 600 it"
        )
    _try_pair(tls)
    client_ca = None
    if tls.mutual:
        client_ca = _read("grpc.tls.client_ca", Path(tls.client_ca))
        _try_authority(tls.client_ca)
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=client_ca, require_client_auth=tls.mutual
    )


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{setting}: {path}: cannot be read: {error.strerror}; put a PEM file there that this "
            "user may read"
        ) from error


def _try_pair(tls: Tls) -> None:
    """Both files hold what they should, and belong together: gRPC itself says that of no file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(tls.certificate)
    except ssl.SSLError:
        raise SettingsError(
            f"grpc.tls.certificate: {tls.certificate}: holds no certificate in PEM form"
        ) from None
    try:
        # An empty password, or OpenSSL would ask for one on a terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(
                f"grpc.tls.key: {tls.key}: is not the key of {tls.certificate}; give the one that "
                "the certificate was made for"
            ) from None
        raise SettingsError(
            f"grpc.tls.key: {tls.key}: holds no private key in PEM form without a password"
        ) from None


def _try_authority(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        raise SettingsError(
            f"grpc.tls.client_ca: {path}: holds no certificate in PEM form"
        ) from None
