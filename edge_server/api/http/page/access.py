"""Who may see the page: its own browser pages alone, and with a token where tokens are needed."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.requests import HTTPConnection

COOKIE = "edge_token"


class PageAccess:
    """Checks requests of browsers.

    Args:
        host_names: by which this device may be called, beside its own, `localhost` and addresses.
        may_read: returns whether a token lets its owner read; None where nobody needs a token.
    """

    def __init__(
        self, host_names: Iterable[str] = (), may_read: Callable[[str], bool] | None = None
    ) -> None:
        own = socket.gethostname()
        names = ("localhost", own, f"{own}.local", *host_names)
        self._names = frozenset(name.lower() for name in names)
        self._may_read = may_read

    def fault_of(self, connection: HTTPConnection) -> str:
        """Return why a request is none of this page's own; "" where it may be.

        A page of another site may have its name point to this device (DNS rebinding): it then comes
        with that name as its host. And browsers let every site open a WebSocket here: it then comes
        with that site as its origin.
        """
        host = connection.headers.get("host", "")
        if not self._is_known(host):
            return (
                f"this device is not called {_without_port(host)!r} here; use its address, or name "
                "it in http.host_names"
            )
        origin = connection.headers.get("origin")
        # Only browsers send it, and they always do so.
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return "another site's page may not read this one"
        return ""

    def may_read(self, token: str) -> bool:
        """Whether the owner of `token` may see the page."""
        return self._may_read is None or bool(token and self._may_read(token))

    def is_open_to(self, connection: HTTPConnection) -> bool:
        """Whether the request has a cookie with a token that may read."""
        return self.may_read(connection.cookies.get(COOKIE, ""))

    def _is_known(self, host: str) -> bool:
        name = _without_port(host).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        # No name server has led a browser to an address.
        return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host
