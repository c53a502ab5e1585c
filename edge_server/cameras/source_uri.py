"""Parse and validate the URIs of frame sources."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from edge_server.errors import SourceUriError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Below 1 Hz, a recording cannot be distinguished from a stalled camera.
SLOWEST_FPS = 1.0
FASTEST_FPS = 1000.0

# Suffixes of image files, alone or in a folder.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})


@dataclass(frozen=True)
class SourceUri:
    """A parsed `scheme://host/path?key=value`, or a plain path as scheme `file` without a query.

    Attributes:
        scheme: lower case.
        host: without user and port, lower case; "" if the URI has none.
        path: percent-decoded.
        query: percent-decoded, every key once.
        label: the source's name in messages, without user and password.
    """

    scheme: str
    host: str
    path: str
    query: Mapping[str, str]
    label: str

    def allow(self, *known: str) -> None:
        """Reject unknown query keys.

        Raises:
            SourceUriError: a key is not in `known`; the text has the nearest match.
        """
        for key in self.query:
            if key not in known:
                raise SourceUriError(f"{self.label}: unknown option {did_you_mean(key, known)}")

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return the value of `key=true|false`.

        Raises:
            SourceUriError: the value is neither `true` nor `false`.
        """
        text = self.query.get(key, str(default).lower())
        if text not in {"true", "false"}:
            raise SourceUriError(f"{self.label}: {key} is {text!r}; write true or false")
        return text == "true"

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        """Return the value of `key`, a whole number from `low` to `high`.

        Raises:
            SourceUriError: the value is no such number.
        """
        text = self.query.get(key, str(default))
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            raise SourceUriError(f"{self.label}: {key} is {text!r}; write a number {low} to {high}")
        return int(text)

    def fps(self) -> float | None:
        """Return the value of `fps`: frames per second, 0 for as fast as possible, None if absent.

        Raises:
            SourceUriError: the value is neither 0 nor within `SLOWEST_FPS` to `FASTEST_FPS`.
        """
        text = self.query.get("fps")
        if text is None:
            return None
        try:
            fps = float(text)
        except ValueError:
            fps = -1.0
        if fps != 0 and not SLOWEST_FPS <= fps <= FASTEST_FPS:
            raise SourceUriError(
                f"{self.label}: fps is {text!r}; write {SLOWEST_FPS:g} to {FASTEST_FPS:g} frames "
                "per second, or 0 for as fast as it can be read"
            )
        return fps


def parse_source_uri(text: str) -> SourceUri:
    """Parse `text`; a text without `://` is a path, whatever characters the text has.

    Raises:
        SourceUriError: `text` is empty, is no URI, or repeats a key.
    """
    if not text.strip():
        raise SourceUriError("the source is empty; name a video file, a folder of images or a URI")
    if "://" not in text:
        return SourceUri(scheme="file", host="", path=text, query={}, label=text)
    try:
        parts = urlsplit(text, allow_fragments=False)
        host = parts.hostname or ""
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        # Both the text and the error may hold a password, so the message quotes neither.
        scheme = text.partition("://")[0]
        raise SourceUriError(
            f"a {scheme}:// source is malformed; write {scheme}://host/path?key=value&key=value"
        ) from None
    path = unquote(parts.path)
    label = f"{parts.scheme}://{host}{path}"
    query = dict(pairs)
    if len(query) < len(pairs):
        raise SourceUriError(f"{label}: an option is given twice; write each once")
    return SourceUri(parts.scheme, host, path, query, label)


def did_you_mean(word: str, known: tuple[str, ...]) -> str:
    """Return `word`, quoted, with its nearest match in `known`, or with all of `known`."""
    nearest = difflib.get_close_matches(word, known, n=1)
    if nearest:
        return f"{word!r}; did you mean {nearest[0]!r}?"
    return f"{word!r}; known: {', '.join(known)}"
