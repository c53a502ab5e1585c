"""Make text that may hold a file name valid UTF-8, in one way for every protocol and log."""

from __future__ import annotations


def as_utf8(text: str) -> str:
    r"""Return `text` with each byte of a file name that is not UTF-8 as an escape like `\xff`.

    Neither JSON nor protobuf accepts the lone surrogate that Python keeps for such a byte.
    """
    if text.isascii():
        return text
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        data = text.encode("utf-8", "backslashreplace")
    return data.decode("utf-8", "backslashreplace")


def shown(name: str) -> str:
    r"""Return a file name in a printable form: as `as_utf8`, and a line break becomes `\n`."""
    text = as_utf8(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_utf8(name: str) -> bool:
    """Return whether a file name is valid UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
