"""Headers of a call that become parameters of its request, for models that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_server.errors import InvalidRequest
from edge_server.settings.transport import header_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.requests import InferRequest

_RESERVED = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
    }
)
# They have tokens of this daemon, which no model and no trace shall have.
_NEVER = frozenset({"authorization", "cookie"})
# The search for a name's match must end soon, whatever name a client makes up.
_LONGEST_NAME = 128


class HeaderForwarding:
    """Adds the headers whose name has a match of `pattern`, somewhere in it (Triton's rule).

    A header counts more than a parameter of the same name: a proxy in front of the server may have
    set it.

    Args:
        pattern: see `header_pattern`; empty forwards none.
        secret: names of headers that are not forwarded, beside those that may have tokens.
    """

    def __init__(self, pattern: str = "", secret: Iterable[str] = ()) -> None:
        self._secret = _NEVER.union(secret)
        self._pattern = header_pattern(pattern) if pattern else None

    def add(
        self, request: InferRequest, headers: Iterable[tuple[str, str | bytes]]
    ) -> InferRequest:
        """Return `request` with the parameters of the call's `headers`.

        Raises:
            InvalidRequest: a header's name is too long for a search; a forwarded header has a
                reserved name, or is no text.
        """
        if self._pattern is None:
            return request
        found = {name: value for name, value in headers if self._matches(name)}
        if not found:
            return request
        forwarded = {name: _text(name, value) for name, value in found.items()}
        return replace(request, parameters={**request.parameters, **forwarded})

    def _matches(self, name: str) -> bool:
        if len(name) > _LONGEST_NAME:
            raise InvalidRequest(
                f"Header '{name[:16]}…' has a name of {len(name)} characters; where headers are "
                f"forwarded it has {_LONGEST_NAME} at most."
            )
        if self._pattern is None or name.lower() in self._secret:
            return False
        return self._pattern.search(name) is not None


def _text(name: str, value: str | bytes) -> str:
    if name in _RESERVED or name.startswith("triton_"):
        raise InvalidRequest(
            f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
        )
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"Header '{name}' is not UTF-8 text and cannot be forwarded."
        ) from error
