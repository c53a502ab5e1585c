"""Requests that their clients compressed: bounded, and counted while they are decompressed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.api.admission import Call

WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's, the header included
PART_BYTES = 256 * 1024


def decompress(
    data: bytes | memoryview, encoding: str, longest_bytes: int, call: Call, setting: str
) -> bytes:
    """Return what `data` was before its client compressed it.

    Args:
        encoding: one of `WINDOW_BITS`.
        longest_bytes: of the result.
        call: counts the result, part by part and before it is kept.
        setting: of `longest_bytes`, for the error text.

    Raises:
        InvalidRequest: it is not compressed in that way, or too long.
        Unavailable: there is no room for the result.
    """
    reader = zlib.decompressobj(WINDOW_BITS[encoding])
    parts: list[bytes] = []
    size_bytes = 0
    try:
        for part in _inflated(reader, memoryview(data)):
            size_bytes += len(part)
            if size_bytes > longest_bytes:
                raise InvalidRequest(
                    f"the body has more than {longest_bytes} bytes when it is decompressed "
                    f"({setting})"
                )
            if len(part) == PART_BYTES:
                call.count(len(part))
            parts.append(part)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not compressed with {encoding}: {error}") from error
    if not reader.eof:
        raise InvalidRequest(f"the body ends before its {encoding} data does")
    return b"".join(parts)


def _inflated(reader: Any, body: memoryview) -> Iterator[bytes]:
    """Yield what `body` decompresses to, in parts of at most `PART_BYTES`."""
    for start in range(0, len(body), PART_BYTES):
        left: bytes | memoryview = body[start : start + PART_BYTES]
        while left and not reader.eof:
            yield reader.decompress(left, PART_BYTES)
            left = reader.unconsumed_tail
    yield reader.flush()
