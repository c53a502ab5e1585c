"""TLS of the listeners: certificates that are renewed, handshakes bounded in time."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from edge_server.api.certificates import CertificateWatch

if TYPE_CHECKING:
    import asyncio

    from edge_server.settings import Tls


class Encryption:
    """The certificates of a listener; renewed files are what new connections see."""

    def __init__(self, name: str, tls: Tls) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._watch = CertificateWatch(tls, f"{name}.tls")
        self._watch.shown.load_into(self.context)

    def renew(self) -> None:
        """Read the files again; what is not valid leaves the certificates as they are."""
        if (found := self._watch.renewed()) is not None:
            found.load_into(self.context)


def bound_handshakes(loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
    """Have the servers of `loop` wait so long for a client's handshake: uvicorn has no setting for
    it, and a minute for connections that nothing counts yet would take all file descriptors."""
    create = loop.create_server

    def create_server(*args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = timeout_s
        return create(*args, **options)

    loop.create_server = create_server  # type: ignore[method-assign]
