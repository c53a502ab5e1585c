"""Text that may name a file, made such that every protocol can carry it."""

from __future__ import annotations


def as_utf8(text: str) -> str:
    """`text` with an escape like `\\udcff` for each byte of a file's name that is not UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
