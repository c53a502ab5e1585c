"""The files of certificates: read together, checked against each other, and read again when they
are renewed."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import SettingsError
from edge_server.process.disk import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.settings import Tls

log = logging.getLogger(__name__)

# The file's group may read it (Debian's ssl-cert); other users have no access.
_TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
# Twice what a system's bundle of all public authorities has; each is parsed while clients wait.
_LONGEST_FILE_BYTES = 512 * 1024
# X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_OUT_OF_DATE = {9: "is not valid yet", 10: "has expired"}
_INVALID_PURPOSE = 26  # X509_V_ERR_INVALID_PURPOSE
# OpenSSL's words for the key of another certificate, the second one for a key of another kind.
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


def check_certificates(tls: Tls, section: str = "grpc.tls") -> None:
    """Check that the files of `tls` can be presented now.

    Args:
        section: of the settings, for error texts.

    Raises:
        SettingsError: a file is missing, unreadable, no PEM, open to everyone, or does not fit
            the others; the text names it and the remedy.
    """
    CertificateFiles.read(tls, section).check(tls)


class CertificateFiles(NamedTuple):
    """The contents of the files at one time; `section` is that of the settings."""

    section: str
    certificate: bytes
    key: bytes
    key_mode: int
    client_ca: bytes | None

    @classmethod
    def read(cls, tls: Tls, section: str) -> CertificateFiles:
        """Raises: SettingsError: a file cannot be read."""
        certificate, _ = _read(f"{section}.certificate", tls.certificate)
        key, mode = _read(f"{section}.key", tls.key)
        client_ca = _read(f"{section}.client_ca", tls.client_ca)[0] if tls.mutual else None
        return cls(section, certificate, key, mode, client_ca)

    @property
    def digest(self) -> str:
        """What tells these certificates from others."""
        content = self.certificate + (self.client_ca or b"")
        return f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"

    def check(self, tls: Tls) -> None:
        """Validate each file and that the files match: OpenSSL's own errors name no file.

        Raises:
            SettingsError: a file is invalid; the text names the file.
        """
        if self.key_mode & _TOO_OPEN:
            raise SettingsError(
                f"{self.section}.key: {tls.key}: others may read or change it (mode "
                f"{self.key_mode:o}): chmod 600 it"
            )
        _try_certificates(f"{self.section}.certificate", tls.certificate, self.certificate)
        server, client = _context(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        try:
            self._present(server)
            _shake_hands(server, client)
        except ssl.SSLError as error:
            if error.reason in _OTHER_KEY:
                fault = (
                    f"key: {tls.key}: is not the key of {tls.certificate}; give the one that the "
                    "certificate was made for"
                )
            elif error.reason is not None:
                fault = (
                    f"certificate: {tls.certificate}: no client could use it "
                    f"({error.reason.replace('_', ' ').lower()}); give a shorter chain, or a key "
                    "of RSA with 2048 bits or more or of P-256"
                )
            else:
                fault = f"key: {tls.key}: holds no private key in PEM form without a password"
            raise SettingsError(f"{self.section}.{fault}") from None
        if self._fault_for_clients() == _INVALID_PURPOSE:
            raise SettingsError(
                f"{self.section}.certificate: {tls.certificate}: is not one of a server; give one "
                "with serverAuth in its extendedKeyUsage, or without that extension"
            )
        if self.client_ca is not None:
            _try_certificates(f"{self.section}.client_ca", tls.client_ca, self.client_ca)

    def check_age(self, tls: Tls, before: CertificateFiles) -> None:
        """Raises: SettingsError: the certificate is not valid now, and that of `before` is."""
        fault = _OUT_OF_DATE.get(self._fault_for_clients())
        if fault and before._fault_for_clients() not in _OUT_OF_DATE:
            raise SettingsError(
                f"{self.section}.certificate: {tls.certificate}: {fault}; give one that is valid"
            )

    def _fault_for_clients(self) -> int:
        """Return OpenSSL's code of why clients that know the certificate refuse it; 0 for none."""
        server, client = _context(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._present(server)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        with _as_file(self.certificate) as certificate:
            client.load_verify_locations(certificate)
        try:
            _shake_hands(server, client)
        except ssl.SSLCertVerificationError as error:
            return error.verify_code
        return 0

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have new connections of `context` see these files, which are valid."""
        self._present(context)
        if self.client_ca is not None:
            with _as_file(self.client_ca) as client_ca:
                context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED

    def _present(self, context: ssl.SSLContext) -> None:
        with _as_file(self.certificate) as certificate, _as_file(self.key) as key:
            # An empty password keeps OpenSSL from asking for one on a terminal.
            context.load_cert_chain(certificate, key, password="")


class CertificateWatch:
    """The certificates that a server presents; not thread-safe.

    Attributes:
        tls: their files, which may be renewed; other paths count at the next look.
        shown: the contents that the server presents.

    Raises:
        SettingsError: see `check_certificates`.
    """

    def __init__(self, tls: Tls, section: str) -> None:
        self.tls = tls
        self.shown = CertificateFiles.read(tls, section)
        self.shown.check(tls)
        self._section = section
        self._server = section.partition(".")[0]
        self._refused: CertificateFiles | None = None
        self._logged = ""

    def renewed(self) -> CertificateFiles | None:
        """Return the contents of the files once they have changed and match each other, else None.

        The log gives the reason why changed files are not presented, once.
        """
        try:
            found = CertificateFiles.read(self.tls, self._section)
            # Compare contents, not times: a file may change twice within a tick of the clock.
            if found in (self.shown, self._refused):
                return None
            self._check(found)
        except (SettingsError, OSError) as error:  # the latter without a free file descriptor
            if str(error) != self._logged:
                self._logged = str(error)
                # The text is complete; a traceback adds nothing.
                log.error("%s: certificates stay as they were: %s", self._server, error)  # noqa: TRY400
            return None
        log.info(
            "%s: certificates were renewed, of %s: now %s",
            self._server,
            self.tls.certificate,
            found.digest,
        )
        self.shown, self._refused, self._logged = found, None, ""
        return found

    def _check(self, found: CertificateFiles) -> None:
        try:
            found.check(self.tls)
        except SettingsError:
            self._refused = found
            raise
        found.check_age(self.tls, self.shown)  # which may change


def _read(setting: str, path: str) -> tuple[bytes, int]:
    """Return the file's contents and its mode."""
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as file:
            content = file.read(_LONGEST_FILE_BYTES + 1)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise SettingsError(
            f"{setting}: {path}: cannot be read: {error.strerror}; put a PEM file there that this "
            "user may read"
        ) from error
    if len(content) > _LONGEST_FILE_BYTES:
        raise SettingsError(
            f"{setting}: {path}: has more than {_LONGEST_FILE_BYTES} bytes; give a PEM file with "
            "what is needed alone"
        )
    return content, mode


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Connect `client` to `server`, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in (*ends, *ends):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _try_certificates(setting: str, path: str, content: bytes) -> None:
    if b"BEGIN TRUSTED CERTIFICATE" in content:  # gRPC cannot read it
        raise SettingsError(
            f"{setting}: {path}: is in a form of OpenSSL alone (TRUSTED CERTIFICATE); convert it: "
            "openssl x509 -in FILE -out NEW"
        )
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
