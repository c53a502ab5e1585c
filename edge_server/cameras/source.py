"""The table of source kinds, and `open_source`, the only function that opens a source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.cameras.source_uri import (
    IMAGE_SUFFIXES,
    SourceUri,
    did_you_mean,
    parse_source_uri,
)
from edge_server.errors import SourceError, SourceUriError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cameras.frame import FrameSource


@dataclass(frozen=True)
class SourceKind:
    """The source kind of one scheme.

    Attributes:
        open: opens a source of this kind, or raises SourceError.
        live: the source is a device, which may be absent now and return later; an absent recording
            is an error.
    """

    open: Callable[[SourceUri], FrameSource]
    live: bool


def open_source(uri: str, kinds: Mapping[str, SourceKind] | None = None) -> FrameSource:
    """Open `uri` and decode its first image, so that a bad source raises here.

    Args:
        uri: a path (video, image, or folder of images), `file:///path?loop=true&fps=10`, or
            `synthetic://road?seed=7&fps=30&width=1280&height=720&frames=100`.
        kinds: the allowed schemes; `SOURCE_KINDS` by default.

    Raises:
        SourceError: the source delivers no image; the text names the remedy.
        SourceUriError: the URI itself is wrong.
    """
    parsed = parse_source_uri(uri)
    try:
        return _kind_of(parsed, kinds).open(parsed)
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


def _open_file(uri: SourceUri) -> FrameSource:
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
            from edge_server.cameras.image_folder import ImageFolder  # noqa: PLC0415

            return ImageFolder(path, fps=fps, loop=loop)
        if path.is_file():
            from edge_server.cameras.video_file import VideoFile  # noqa: PLC0415

            return VideoFile(path, fps=fps, loop=loop)
        found = path.exists()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; check the path and its rights") from error
    if found:
        raise SourceError(f"{path}: is neither a file nor a folder; name a video or images")
    hint = "; options need the form file:///absolute/path?loop=true" if "?" in uri.path else ""
    raise SourceError(f"{path.absolute()}: no such file or folder; check the path{hint}")


def _open_synthetic(uri: SourceUri) -> FrameSource:
    if uri.host != "road" or uri.path not in {"", "/"}:
        scene = uri.host + uri.path
        raise SourceUriError(f"{uri.label}: unknown scene {did_you_mean(scene, ('road',))}")
    uri.allow("seed", "fps", "width", "height", "frames")
    from edge_server.cameras.synthetic.synthetic_road import SyntheticRoad  # noqa: PLC0415

    return SyntheticRoad(
        seed=uri.whole("seed", 0, 0, 2**32 - 1),
        fps=uri.fps(),
        width_px=uri.whole("width", 1280, 64, 4096),
        height_px=uri.whole("height", 720, 64, 4096),
        frames=uri.whole("frames", 0, 0, 2**32 - 1),
    )


SOURCE_KINDS: Mapping[str, SourceKind] = MappingProxyType(
    {
        "file": SourceKind(_open_file, live=False),
        "synthetic": SourceKind(_open_synthetic, live=False),
    }
)
