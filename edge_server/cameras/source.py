"""Source URIs, the table of source kinds, and `open_source`, the only function that opens one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from edge_server.cameras.frame import FASTEST_FPS, IMAGE_SUFFIXES, SLOWEST_FPS
from edge_server.errors import SourceError, SourceUriError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cameras.frame import FrameSource
    from edge_server.pixels import ColourMatrix, ColourRange


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


@dataclass(frozen=True)
class Credentials:
    """User name and password of a camera; never part of a text that people see."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class SourceOptions:
    """What a camera's settings add to its URI.

    Attributes:
        credentials: those of the URI come first.
        reader: of a live camera; `auto` prefers GStreamer.
        matrix: overrides the matrix that the camera reports.
        range: likewise the range.
    """

    credentials: Credentials | None = None
    reader: Literal["auto", "gstreamer", "opencv"] = "auto"
    matrix: ColourMatrix | None = None
    range: ColourRange | None = None


NO_OPTIONS = SourceOptions()


@dataclass(frozen=True)
class SourceKind:
    """The source kind of one scheme.

    Attributes:
        open: opens a source of this kind, or raises SourceError.
        live: the source is a device, which may be absent now and return later; an absent recording
            is an error.
    """

    open: Callable[[SourceUri, SourceOptions], FrameSource]
    live: bool


def open_source(
    uri: str,
    kinds: Mapping[str, SourceKind] | None = None,
    options: SourceOptions = NO_OPTIONS,
) -> FrameSource:
    """Open `uri` and decode its first image, so that a bad source raises here.

    Args:
        uri: a path (video, image, or folder of images), `file:///path?loop=true&fps=10`, or
            `synthetic://road?seed=7&fps=30&width=1280&height=720&frames=100`.
        kinds: the allowed schemes; `SOURCE_KINDS` by default.
        options: of a live camera.

    Raises:
        SourceError: the source delivers no image; the text names the remedy.
        SourceUriError: the URI itself is wrong.
    """
    parsed = parse_source_uri(uri)
    try:
        return _kind_of(parsed, kinds).open(parsed, options)
    except ModuleNotFoundError as error:
        if error.name != "cv2":
            raise
        raise SourceError(
            f"{parsed.label}: OpenCV for Python (cv2) is missing; on a Jetson: "
            "apt install python3-opencv, elsewhere: pip install opencv-python-headless"
        ) from error


def is_live(uri: str, kinds: Mapping[str, SourceKind] | None = None) -> bool:
    """Return whether `uri` names a device, which may return after a loss, rather than a recording.

    Raises:
        SourceUriError: the scheme is unknown or the URI malformed.
    """
    return _kind_of(parse_source_uri(uri), kinds).live


def _kind_of(uri: SourceUri, kinds: Mapping[str, SourceKind] | None) -> SourceKind:
    table = SOURCE_KINDS if kinds is None else kinds
    kind = table.get(uri.scheme)
    if kind is None:
        known = ", ".join(f"{scheme}://" for scheme in table)
        raise SourceUriError(
            f"{uri.label}: unknown kind of source {uri.scheme + '://'!r}; "
            f"known: {known} and plain paths"
        )
    return kind


# The openers import late: OpenCV takes long to import, and `edge-server --help` imports this file.


def _open_file(uri: SourceUri, _: SourceOptions) -> FrameSource:
    uri.allow("loop", "fps")
    if uri.host not in {"", "localhost"}:
        raise SourceUriError(
            f"{uri.label}: a file:// source wants an absolute path; write "
            f"file://{Path.cwd() / (uri.host + uri.path)}"
        )
    path = Path(uri.path)
    loop, fps = uri.flag("loop"), uri.fps()
    try:
        if path.is_file():
            # OpenCV reports an unreadable file and a damaged file alike.
            path.open("rb").close()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES):
            from edge_server.cameras.recordings import open_images  # noqa: PLC0415

            return open_images(path, fps=fps, loop=loop)
        if path.is_file():
            from edge_server.cameras.recordings import open_video  # noqa: PLC0415

            return open_video(path, fps=fps, loop=loop)
        found = path.exists()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; check the path and its rights") from error
    if found:
        raise SourceError(f"{path}: is neither a file nor a folder; name a video or images")
    hint = "; options need the form file:///absolute/path?loop=true" if "?" in uri.path else ""
    raise SourceError(f"{path.absolute()}: no such file or folder; check the path{hint}")


def _open_synthetic(uri: SourceUri, _: SourceOptions) -> FrameSource:
    if uri.host != "road" or uri.path not in {"", "/"}:
        scene = uri.host + uri.path
        raise SourceUriError(f"{uri.label}: unknown scene {did_you_mean(scene, ('road',))}")
    uri.allow("seed", "fps", "width", "height", "frames")
    from edge_server.cameras.synthetic.road_renderer import synthetic_road  # noqa: PLC0415

    return synthetic_road(
        seed=uri.whole("seed", 0, 0, 2**32 - 1),
        fps=uri.fps(),
        width=uri.whole("width", 1280, 64, 4096),
        height=uri.whole("height", 720, 64, 4096),
        frames=uri.whole("frames", 0, 0, 2**32 - 1),
    )


SOURCE_KINDS: Mapping[str, SourceKind] = MappingProxyType(
    {
        "file": SourceKind(_open_file, live=False),
        "synthetic": SourceKind(_open_synthetic, live=False),
    }
)
