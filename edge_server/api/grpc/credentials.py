"""The certificates of the TCP side: validated at the start, and reloaded when the files change."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import stat
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc

from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.settings import Tls

log = logging.getLogger(__name__)

# The file's group may read it (Debian's ssl-cert); other users have no access.
_TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


def check_certificates(tls: Tls) -> None:
    """Check that the files of `tls` can be presented now.

    Raises:
        SettingsError: a file is missing, unreadable, no PEM, open to everyone, or does not fit
            the others; the text names it and the remedy.
    """
    _try(tls, _Files.read(tls))


class _Files(NamedTuple):
    """The contents of the files at one time."""

    certificate: bytes
    key: bytes
    key_mode: int
    client_ca: bytes | None

    @classmethod
    def read(cls, tls: Tls) -> _Files:
        """Raises: SettingsError: a file cannot be read."""
        certificate, _ = _read("grpc.tls.certificate", tls.certificate)
        key, mode = _read("grpc.tls.key", tls.key)
        client_ca = _read("grpc.tls.client_ca", tls.client_ca)[0] if tls.mutual else None
        return cls(certificate, key, mode, client_ca)

    @property
    def digest(self) -> str:
        """What tells these certificates from others."""
        content = self.certificate + (self.client_ca or b"")
        return f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], root_certificates=self.client_ca
        )


class Certificates:
    """The server's certificate, and the clients' authority if `tls` is mutual.

    Every new connection gets the present contents of the files, once they match each other; until
    then it gets the previous contents, and the log gives the reason. Open connections stay.

    Attributes:
        credentials: for the port of a server.

    Raises:
        SettingsError: see `check_certificates`.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._shown = shown = _Files.read(tls)
        _try(tls, shown)
        self._refused: _Files | None = None
        self._logged = ""
        self.credentials = grpc.dynamic_ssl_server_credentials(
            shown.configuration,
            self._renewal,  # type: ignore[arg-type]  # the stub forgets None, for no change
            require_client_authentication=tls.mutual,
        )

    def change(self, tls: Tls) -> None:
        """Take the files from other paths, for new connections; `tls` is mutual as before."""
        with self._lock:
            self._tls = tls

    def _renewal(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, on its threads: new certificates, or None."""
        with self._lock:
            try:
                return self._renewed()
            except SettingsError as error:
                if str(error) != self._logged:
                    self._logged = str(error)
                    # The text is complete; a traceback adds nothing.
                    log.error("grpc: certificates stay as they were: %s", error)  # noqa: TRY400
                return None

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        found = _Files.read(self._tls)
        # Compare contents, not times: a file may change twice within a tick of the clock.
        if found in (self._shown, self._refused):
            return None
        self._refused = found
        _try(self._tls, found)
        log.info(
            "grpc: certificates were renewed, of %s: now %s", self._tls.certificate, found.digest
        )
        self._shown, self._refused, self._logged = found, None, ""
        return found.configuration


def _read(setting: str, path: str) -> tuple[bytes, int]:
    """Return the file's contents and its mode."""
    try:
        with Path(path).open("rb") as file:
            return file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise SettingsError(
            f"{setting}: {path}: cannot be read: {error.strerror}; put a PEM file there that this "
            "user may read"
        ) from error


def _try(tls: Tls, files: _Files) -> None:
    """Validate each file and that the files match: gRPC's own errors name no file.

    Raises:
        SettingsError: a file is invalid; the text names the file.
    """
    if files.key_mode & _TOO_OPEN:
        raise SettingsError(
            f"grpc.tls.key: {tls.key}: others may read or change it (mode {files.key_mode:o}): "
            "chmod 600 it"
        )
    _try_pair(tls, files)
    if files.client_ca is not None:
        _try_certificates("grpc.tls.client_ca", tls.client_ca, files.client_ca)


def _try_pair(tls: Tls, files: _Files) -> None:
    _try_certificates("grpc.tls.certificate", tls.certificate, files.certificate)
    try:
        with _as_file(files.certificate) as certificate, _as_file(files.key) as key:
            # An empty password keeps OpenSSL from asking for one on a terminal.
            _context().load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(
                f"grpc.tls.key: {tls.key}: is not the key of {tls.certificate}; give the one that "
                "the certificate was made for"
            ) from None
        raise SettingsError(
            f"grpc.tls.key: {tls.key}: holds no private key in PEM form without a password"
        ) from None


def _try_certificates(setting: str, path: str, content: bytes) -> None:
    try:
        with _as_file(content) as file:
            _context().load_verify_locations(file)
    except ssl.SSLError:
        raise SettingsError(f"{setting}: {path}: holds no certificate in PEM form") from None


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield a path in memory: OpenSSL takes paths, and the file on disk may have changed by now."""
    descriptor = os.memfd_create("pem")
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{descriptor}"
