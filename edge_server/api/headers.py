"""Headers of a call that become parameters of its request, for models that read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_server.errors import InvalidRequest

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


class HeaderForwarding:
    """Adds the headers whose name has a match of `pattern`, somewhere in it (Triton's rule).

    A header counts more than a parameter of the same name: a proxy in front of the server may have
    set it.

    Args:
        pattern: a valid regular expression; empty forwards none.
    """

    def __init__(self, pattern: str = "") -> None:
        self._pattern = re.compile(pattern) if pattern else None

    def add(
        self, request: InferRequest, headers: Iterable[tuple[str, str | bytes]]
    ) -> InferRequest:
        """Return `request` with the parameters of the call's `headers`.

        Raises:
            InvalidRequest: a forwarded header has a reserved name, or is no text.
        """
        if self._pattern is None:
            return request
        found = {name: value for name, value in headers if self._pattern.search(name)}
        if not found:
            return request
        forwarded = {name: _text(name, value) for name, value in found.items()}
        return replace(request, parameters={**request.parameters, **forwarded})


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
