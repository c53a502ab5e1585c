"""Text that leaves this process: valid UTF-8, printable, short, without passwords of cameras."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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


MASK = "***"

# Shorter values would also hide words and numbers that have nothing to do with the secret; they are
# masked only in their place in a URI.
_SHORTEST = 4

# A user name and a password in a URI, up to the last @, as a password may have one itself.
_USERINFO = re.compile(r"://([^\s:/@]*)(:?)(\S*)@")
_SPACE = re.compile(r"\s|\Z")
# `user-pw=…` in a pipeline, `pwd=…`, `loginpas=…`, `_password=…` or `api_key=…` in the path or the
# query of a URI.
_STEMS, _ENDS = ("pas", "pass"), ("", "word", "wort", "wd", "phrase", "code")
_OTHERS = ("pwd", "pw", "token", "secret", "signature", "credential")
_KEYS = (
    *(stem + end for stem in _STEMS for end in _ENDS),
    *(of + gap + "key" for of in ("api", "access", "stream", "auth") for gap in ("", "_", "-")),
    *_OTHERS,
)
_LONGEST_KEY = max(map(len, _KEYS))
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s&;,\"'/?]+")
# In longer texts, a secret is looked for in one piece before its expression is tried everywhere.
_LONG = 4096
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")

# One table for the process, as the root logger is one: the writer of a text need not know who
# holds a secret. Longest first, as a secret may begin with another; replaced, never changed.
_patterns: tuple[tuple[str, re.Pattern[str]], ...] = ()


def remember_secret(secret: str) -> None:
    """Mask `secret` in every text from now on, as it is or percent-encoded."""
    global _patterns  # noqa: PLW0603  # see its comment
    if secret and all(secret != known for known, _ in _patterns):
        more = (*_patterns, (secret, re.compile(_any_form(secret))))
        _patterns = tuple(sorted(more, key=lambda pair: -len(pair[0])))


def remember_login(user: str, password: str) -> None:
    """Mask `password`, also as HTTP and RTSP send it for Basic authentication."""
    remember_secret(password)
    if password:
        remember_secret(b64encode(f"{user}:{password}".encode()).decode())


def masked(text: str) -> str:
    for secret, pattern in _patterns:
        if len(text) < _LONG or _may_have(text, secret):
            text = pattern.sub(MASK, text)
    return text


def _may_have(text: str, secret: str) -> bool:
    """Return False where `secret` is in `text` in none of the forms of `_any_form`."""
    if not {"%", "\\", "'", '"'}.isdisjoint(secret):
        return True
    if "%" in text and secret[0] in _HEX_DIGITS:
        return True  # decoding could take its first letters for those of an escape before it
    data = text.encode(errors="surrogatepass")
    return secret.encode(errors="surrogatepass") in (
        unquote_to_bytes(data) if b"%" in data else data
    )


def masked_by_place(text: str) -> str:
    """Return `text` with `MASK` where a URI or a pipeline has a password, and remember those."""
    for user, secret in secrets_by_place(text):
        if user is None:
            remember_secret(secret)
        else:
            remember_login(user, secret)
    without_logins = replaced(text, ((login.span(), f"://{MASK}@") for login in _logins(text)))
    values = ((value.span(), MASK) for value in _keyed_values(without_logins))
    return masked(replaced(without_logins, values))


def replaced(text: str, changes: Iterable[tuple[tuple[int, int], str]]) -> str:
    """Return `text` with each of the spans, which are in their order, replaced by its new text."""
    parts: list[str] = []
    at = 0
    for (begin, end), new in changes:
        parts += (text[at:begin], new)
        at = end
    return "".join((*parts, text[at:]))


def secrets_by_place(text: str) -> list[tuple[str | None, str]]:
    """Return the passwords where a URI or a pipeline has them, each with the user if that is beside
    it."""
    found: list[tuple[str | None, str]] = [
        (None, value[0].strip("\"'")) for value in _keyed_values(text)
    ]
    logins = (login for login in _logins(text) if login[2])
    return found + [(unquote(login[1]), unquote(login[3])) for login in logins]


def _logins(text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of `_USERINFO`, in a time that grows with the length of `text` alone."""
    at = 0
    while (at := text.find("://", at)) >= 0:
        space = _SPACE.search(text, at)
        end = len(text) if space is None else space.start()
        if text.rfind("@", at, end) < 0:
            at = end  # nor has what follows in this word
        elif (login := _USERINFO.match(text, at, end)) is not None:
            yield login
            at = login.end()


def _keyed_values(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while (at := text.find("=", at)) >= 0:
        at += 1
        if text[max(0, at - 1 - _LONGEST_KEY) : at - 1].casefold().endswith(_KEYS) and (
            value := _VALUE.match(text, at)
        ):
            yield value
            at = value.end()


def _any_form(secret: str) -> str:
    """Return an expression for `secret`, each character as it is, escaped or percent-encoded."""
    form = "".join(_any_form_of_one(character) for character in secret)
    return form if len(secret) >= _SHORTEST else f"(?<=:){form}(?=@)"


def _any_form_of_one(character: str) -> str:
    encoded = "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogatepass"))
    escape = r"\\?" if character in "\\'\"" else ""
    return f"(?:(?i:{encoded})|{escape}{re.escape(character)})"
