"""Secrets that no text of this process shows: passwords of cameras."""

from __future__ import annotations

import re
from base64 import b64encode
from urllib.parse import unquote

MASK = "***"

# Shorter values would also hide words and numbers that have nothing to do with the secret; they are
# masked only in their place in a URI.
_SHORTEST = 4

# A user name and a password in a URI, up to the last @, as a password may have one itself.
_USERINFO = re.compile(r"://([^\s:/@]*)(:?)(\S*)@")
# `user-pw=…` in a pipeline, `pwd=…`, `loginpas=…` or `_password=…` in the path or the query of a
# camera's URI.
_KEYED = re.compile(
    r"(?i)(?<![a-z])([a-z]*-?(?:pass?(?:word|wd|phrase|code)?|pwd|pw|token|secret))="
    r"(\"[^\"]*\"|'[^']*'|[^\s&;,\"'/?]+)"
)

# One table for the process, as the root logger is one: whoever writes a text need not know who
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
    """Return `text` with `MASK` instead of every secret."""
    for _, pattern in _patterns:
        text = pattern.sub(MASK, text)
    return text


def masked_by_place(text: str) -> str:
    """Return `text` with `MASK` where a URI or a pipeline has a password, and remember those."""
    for user, secret in secrets_by_place(text):
        if user is None:
            remember_secret(secret)
        else:
            remember_login(user, secret)
    return masked(_KEYED.sub(rf"\1={MASK}", _USERINFO.sub(f"://{MASK}@", text)))


def secrets_by_place(text: str) -> list[tuple[str | None, str]]:
    """Return the passwords where a URI or a pipeline has them, each with the user if that is beside
    it."""
    found: list[tuple[str | None, str]] = [
        (None, key[2].strip("\"'")) for key in _KEYED.finditer(text)
    ]
    logins = (login for login in _USERINFO.finditer(text) if login[2])
    return found + [(unquote(login[1]), unquote(login[3])) for login in logins]


def _any_form(secret: str) -> str:
    """Return an expression for `secret`, each character as it is, escaped or percent-encoded."""
    form = "".join(_any_form_of_one(character) for character in secret)
    return form if len(secret) >= _SHORTEST else f"(?<=:){form}(?=@)"


def _any_form_of_one(character: str) -> str:
    encoded = "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogatepass"))
    escape = r"\\?" if character in "\\'\"" else ""
    return f"(?:(?i:{encoded})|{escape}{re.escape(character)})"
