"""The certificates of the TCP side: validated at the start, and reloaded when the files change."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import grpc

from edge_server.api.certificates import CertificateFiles
from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from edge_server.settings import Tls

log = logging.getLogger(__name__)

_SECTION = "grpc.tls"


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
        self._shown = shown = CertificateFiles.read(tls, _SECTION)
        shown.check(tls)
        self._refused: CertificateFiles | None = None
        self._logged = ""
        self.credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
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
        found = CertificateFiles.read(self._tls, _SECTION)
        # Compare contents, not times: a file may change twice within a tick of the clock.
        if found in (self._shown, self._refused):
            return None
        self._refused = found
        found.check(self._tls)
        log.info(
            "grpc: certificates were renewed, of %s: now %s", self._tls.certificate, found.digest
        )
        self._shown, self._refused, self._logged = found, None, ""
        return _configuration(found)


def _configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.key, files.certificate)], root_certificates=files.client_ca
    )
