"""Make text that may hold a file name valid UTF-8 for every protocol."""

from __future__ import annotations


def as_utf8(text: str) -> str:
    """Return `text` with each non-UTF-8 byte of a file name as an escape like `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
