"""Who may see the page: browsers with a token's cookie, where tokens are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import HTTPConnection

COOKIE = "edge_token"


class PageAccess:
    """Checks tokens of browsers; which pages they may come from is `BrowserRule`'s.

    Args:
        may_read: returns whether a token lets its owner read; None where nobody needs a token.
    """

    def __init__(self, may_read: Callable[[str], bool] | None = None) -> None:
        self._may_read = may_read

    def may_read(self, token: str) -> bool:
        """Whether the owner of `token` may see the page."""
        return self._may_read is None or bool(token and self._may_read(token))

    def is_open_to(self, connection: HTTPConnection) -> bool:
        """Whether the request has a cookie with a token that may read."""
        return self.may_read(connection.cookies.get(COOKIE, ""))
