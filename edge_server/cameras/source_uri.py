"""URIs of sources: where frames come from, with whose password, and how people see the URI."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from edge_server.cameras.frame import FASTEST_FPS, SLOWEST_FPS
from edge_server.errors import SettingsError, SourceError, SourceUriError
from edge_server.process.text import masked, masked_by_place, remember_login, remember_secret
from edge_server.settings.read import read_text_file

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from edge_server.cameras.frame import UsefulSize
    from edge_server.pixels import ColourMatrix, ColourRange

# Every other scheme, a misspelt one too, names a camera in the network: its URI may have a
# password, and its query is the camera's but for our own options.
_LOCAL_SCHEMES = frozenset({"csi", "v4l2", "file", "mcap", "synthetic"})

_SCHEME = re.compile(r"\s*[a-zA-Z][\w+.-]*")
# A network camera's URI without its `://`, and a login in what is no URI at all.
_BROKEN_URI = re.compile(r"(?i)\s*(rtsps?|https?)\s*(?:[:;]|//|\\\\)")
_LOGIN_OF_PATH = re.compile(r"[^\s/\\:@]:(?=[^\\])(.+)@")
_VIDEO_DEVICE = re.compile(r"/dev/(video\d+|v4l/.+)")
_GST = "gst:"
# In a user name or a password: ends it too early, or is no percent-encoding.
_UNSAFE = re.compile(r"[@/?#\s]|%(?![0-9A-Fa-f]{2})")
_NO_UTF8 = re.compile("[\ud800-\udfff]")  # how Python passes on such bytes of a command line
_LINE_END = re.compile(r"\r\n|\r|\n")
_LOGIN_HINT = (
    "; in a user name or a password write @ as %40, : as %3A, / as %2F, ? as %3F, # as %23, % as "
    "%25, [ as %5B, ] as %5D, or put both into a file"
)


@dataclass(frozen=True)
class Credentials:
    """User name and password of a camera; no text of this process shows the password."""

    user: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        remember_login(self.user, self.password)


@dataclass(frozen=True)
class SourceUri:
    """A parsed `scheme://host/path?key=value`, a plain path or a pipeline.

    A plain path has the scheme `v4l2` if it names a video device, else `file`; neither has a query.
    `gst:PIPELINE` has the scheme `gst`.

    Attributes:
        scheme: lower case.
        host: without user and port, lower case; "" if the URI has none.
        path: percent-decoded; the pipeline as it is written.
        query: percent-decoded; every key once, but for keys of a network camera itself.
        label: the source's name in messages, without user, password and query.
        port: None if the URI has none.
        credentials: percent-decoded; None if the URI has no user.
        target: of a network camera: path and query as they are written.
    """

    scheme: str
    host: str
    path: str
    query: Mapping[str, str]
    label: str
    port: int | None = None
    credentials: Credentials | None = None
    target: str = ""

    def address(self, *own: str, login: str = "") -> str:
        """Return the URI for a network camera, without the options `own`, which are ours.

        Args:
            own: keys of the query that the camera does not get.
            login: percent-encoded `user:password`; goes before the host. The URI's own user and
                password are never in the result.
        """
        path, _, query = self.target.partition("?")
        kept = [pair for pair in query.split("&") if pair and pair.partition("=")[0] not in own]
        login = f"{login}@" if login else ""
        return f"{self.scheme}://{login}{_authority(self.host, self.port)}{path}" + (
            f"?{'&'.join(kept)}" if kept else ""
        )

    def fault(self, text: str, reason: str = "unavailable") -> SourceError:
        """Return the error of this source, which its label begins; see `SourceError.reason`."""
        text = masked(text).removeprefix(f"{self.label}: ")
        return SourceError(f"{self.label}: {text}", reason=reason)

    def wrong(self, text: str) -> SourceUriError:
        """Return the error of a URI that is wrong in itself."""
        return SourceUriError(f"{self.label}: {text}")

    def allow(self, *known: str) -> None:
        """Raise SourceUriError for a key that is not in `known`; it names the nearest match."""
        for key in self.query:
            if key not in known:
                raise self.wrong(f"unknown option {did_you_mean(key, known)}")

    def flag(self, key: str) -> bool:
        """Return the value of `key=true|false`, False if absent; raise SourceUriError else."""
        text = self.query.get(key, "false")
        if text not in {"true", "false"}:
            raise self.wrong(f"{key} is {text!r}; write true or false")
        return text == "true"

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        """Return the value of `key`, a whole number from `low` to `high`; raise SourceUriError for
        any other."""
        text = self.query.get(key, str(default))
        if not (text.isdecimal() and len(text) <= 10 and low <= int(text) <= high):
            raise self.wrong(f"{key} is {text!r}; write a number {low} to {high}")
        return int(text)

    def fps(self) -> float | None:
        """Return the value of `fps`: frames per second, 0 for lock-step, None if absent; raise
        SourceUriError for one beyond `SLOWEST_FPS` to `FASTEST_FPS`."""
        text = self.query.get("fps")
        if text is None:
            return None
        try:
            fps = float(text)
        except ValueError:
            fps = -1.0
        if fps != 0 and not SLOWEST_FPS <= fps <= FASTEST_FPS:
            raise self.wrong(
                f"fps is {text!r}; write {SLOWEST_FPS:g} to {FASTEST_FPS:g} frames "
                "per second, or 0 for every frame, as fast as they are processed"
            )
        return fps

    def speed(self) -> float:
        """Return the value of `speed`: how many times as fast as it was recorded; 1 if absent.
        Raise SourceUriError for one that is not within 0.1 to 10."""
        text = self.query.get("speed", "1")
        try:
            speed = float(text)
        except ValueError:
            speed = 0.0
        if not 0.1 <= speed <= 10:
            raise self.wrong(f"speed is {text!r}; write 0.1 to 10")
        return speed


@dataclass(frozen=True)
class SourceOptions:
    """What a camera's settings add to its URI.

    Attributes:
        credentials: of a network camera; those of its URI come first.
        reader: of a live camera; `auto` prefers GStreamer.
        matrix: overrides the matrix that the camera reports.
        range: likewise the range.
        useful: the smallest size that a decoder may give pictures.
    """

    credentials: Credentials | None = None
    reader: Literal["auto", "gstreamer", "opencv"] = "auto"
    matrix: ColourMatrix | None = None
    range: ColourRange | None = None
    useful: UsefulSize | None = field(default=None, compare=False)


NO_OPTIONS = SourceOptions()


def parse_source_uri(text: str) -> SourceUri:
    """Parse `text`; a text without `://` is a path or, after `gst:`, a pipeline.

    Raises:
        SourceUriError: `text` is empty, is no URI, or repeats a key.
    """
    if not text.strip():
        raise SourceUriError("the source is empty; name a video file, a folder of images or a URI")
    if ("://" in text or text[: len(_GST)].lower() == _GST) and _NO_UTF8.search(text):
        raise SourceUriError("the URI of a source is not UTF-8; percent-encode its bytes (%FF)")
    if text[: len(_GST)].lower() == _GST:
        pipeline = text[len(_GST) :].strip()
        if not pipeline or pipeline.startswith("//"):
            raise SourceUriError(
                "a gst: source has no pipeline; write it as gst-launch-1.0 takes it, like "
                "gst:videotestsrc ! video/x-raw,format=NV12,width=1280,height=720"
            )
        return SourceUri("gst", "", pipeline, {}, masked_by_place(f"{_GST}{pipeline}"))
    if "://" not in text:
        _refuse_broken_uri(text)
        scheme = "v4l2" if _VIDEO_DEVICE.fullmatch(text) else "file"
        return SourceUri(scheme, host="", path=text, query={}, label=masked(text))
    scheme = text.partition("://")[0].lower()
    if not _SCHEME.fullmatch(scheme):
        raise SourceUriError(
            "a source has something else than a scheme before ://; write it like "
            "rtsp://user:password@host/path"
        )
    network = scheme not in _LOCAL_SCHEMES
    # An error of this part quotes nothing, as any of it may be of a password.
    try:
        parts = urlsplit(text, allow_fragments=False)
        _refuse_stray_brackets(parts.netloc)
        host, port = parts.hostname or "", parts.port
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query) and not network
        )
        # A later @ most likely ends a password whose / or ? was taken for the end of the host.
        _, _, rest = text.partition("://")
        credentials = _credentials(rest if network else parts.netloc)
    except ValueError:
        hint = _LOGIN_HINT if network else ""
        raise SourceUriError(
            f"a {scheme}:// source is malformed; write {scheme}://"
            f"{'user:password@' if network else ''}host/path?key=value&key=value{hint}"
        ) from None
    path = unquote(parts.path)
    # What cannot be a scheme is part of the path for urlsplit.
    label = f"{scheme}://{_authority(host, port)}{path}" if parts.scheme else path
    query = dict(pairs)
    if network:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        masked_by_place(parts.query)  # remembers what it masks
        return SourceUri(
            scheme, host, path, query, masked_by_place(label), port, credentials, target
        )
    if len(query) < len(pairs):
        raise SourceUriError(f"{label}: an option is given twice; write each once")
    return SourceUri(scheme, host, path, query, label, port, credentials)


def home_hint(path: str | os.PathLike[str]) -> str:
    """Return where to put a file that lies in a home, which the installed service does not see
    (`ProtectHome=yes`); empty for any other."""
    in_home = any(Path(path).is_relative_to(home) for home in ("/home", "/root", "/run/user"))
    return "; the service cannot read home directories: put it below /srv" if in_home else ""


def _refuse_stray_brackets(netloc: str) -> None:
    """Raises: ValueError: a bracket that is not around an IPv6 address; Python 3.10 takes some."""
    login, _, host = netloc.rpartition("@")
    if "[" in login or "]" in login or ("[" in host) != ("]" in host):
        raise ValueError("a bracket without its other one, or in the login")


def _refuse_broken_uri(text: str) -> None:
    """Remember the password in a text without `://`, which is a path or the URI of a camera that
    somebody mistyped.

    Raises:
        SourceUriError: it is the latter; the text quotes nothing of it.
    """
    login = _LOGIN_OF_PATH.search(text)
    broken = _BROKEN_URI.match(text)
    if broken is not None:
        scheme = broken[1].lower()
        raise SourceUriError(
            f"a source begins like {scheme}:// and has no ://; write "
            f"{scheme}://user:password@host/path, or for a file of such a name ./{scheme}..."
        )
    if login is not None:
        remember_secret(login[1])


def masked_uri(text: str) -> str:
    """Return what messages may show of `text`, whether it is a right URI or not."""
    try:
        return parse_source_uri(text).label
    except SourceUriError:
        scheme, separator, _ = text.partition("://")
        known = bool(separator) and _SCHEME.fullmatch(scheme)
        return f"{scheme}://***" if known else "***"


def read_credentials(path: str | os.PathLike[str]) -> Credentials:
    """Return the credentials in a file: `user:password` in one line, or each in a line of its own.

    Nothing is percent-decoded, and a password may have any character but a line end.

    Raises:
        SettingsError: the file cannot be read, or has something else; the text has nothing of its
            contents.
    """
    try:
        # Not splitlines, which also splits at characters that a password may have.
        lines = _LINE_END.split(read_text_file(path).rstrip("\r\n"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # a NUL in the path
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    if len(lines) == 1:
        user, colon, password = lines[0].partition(":")
    else:
        user, colon, password = "", "", ""
        if len(lines) == 2 and ":" not in lines[0]:
            (user, password), colon = lines, "\n"
    if not (user and colon):
        raise SettingsError(
            f"{path}: has no credentials; write user:password in one line, or the user name and "
            "the password, each in a line of its own"
        )
    return Credentials(user, password)


def _authority(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def _credentials(text: str) -> Credentials | None:
    """Return the decoded user and password of `user:password@host`; None without an @.

    Raises:
        ValueError: a character that must be percent-encoded is not.
    """
    login, at, _ = text.rpartition("@")
    if not at or not login:
        return None
    if _UNSAFE.search(login):
        raise ValueError
    user, _, password = login.partition(":")
    return Credentials(unquote(user, errors="strict"), unquote(password, errors="strict"))


def did_you_mean(word: str, known: tuple[str, ...]) -> str:
    """Return `word`, quoted, with its nearest match in `known`, or with all of `known`."""
    nearest = difflib.get_close_matches(word, known, n=1)
    if nearest:
        return f"{word!r}; did you mean {nearest[0]!r}?"
    return f"{word!r}; known: {', '.join(known)}"
