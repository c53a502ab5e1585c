"""Make text valid UTF-8, printable and short, in one way for every protocol and log."""

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


def shortened(text: str, longest: int, *, counted: bool = False) -> str:
    """Return `text`, cut to `longest` characters and marked; `counted` adds how many follow."""
    if len(text) <= longest:
        return text
    more = f" and {len(text) - longest} characters more" if counted else ""
    return f"{text[:longest]}…{more}"


def is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
