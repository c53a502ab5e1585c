"""The table of source kinds, and `open_source`, the only function that opens one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_server.board.installation import remedy
from edge_server.cameras.frame import IMAGE_SUFFIXES
from edge_server.cameras.gstreamer_frames import loading_gstreamer
from edge_server.cameras.gstreamer_pipelines import flip_of
from edge_server.cameras.live_source import look_for_device, look_for_port
from edge_server.cameras.source_uri import NO_OPTIONS, did_you_mean, home_hint, parse_source_uri
from edge_server.cameras.v4l2 import V4L2_FORMATS
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source_uri import SourceOptions, SourceUri


_LIBRARIES = {
    "cv2": "OpenCV for Python (cv2)",
    "mcap": "the MCAP library for Python (mcap)",
    "foxglove_schemas_protobuf": "the library of Foxglove's messages (foxglove_schemas_protobuf)",
}


@dataclass(frozen=True)
class SourceKind:
    """The source kind of one scheme.

    Attributes:
        live: the source is a device, which may be absent now and return later; an absent recording
            is an error.
        device: its driver runs on this machine, and only a new process gets one that hangs back.
        check: raises SourceUriError where a URI of this kind can never be opened on any machine.
        look: starts to look whether a lost device is there; None where only opening it shows that.
        library: starts to load what reads the source, once in the process, and returns the load;
            None where there is nothing to wait for. A source is opened when it is done.
    """

    open: Callable[[SourceUri, SourceOptions], FrameSource]
    live: bool
    device: bool = False
    check: Callable[[SourceUri], None] = lambda _: None
    look: Callable[[SourceUri], Future[bool] | None] | None = None
    library: Callable[[SourceOptions], Future[object] | None] = lambda _: None


def open_source(
    uri: str, kinds: Mapping[str, SourceKind] | None = None, options: SourceOptions = NO_OPTIONS
) -> FrameSource:
    """Open `uri` and decode its first image, so that a bad source raises here.

    Args:
        uri: a path (video, image, folder of images, /dev/videoN) or a URI of `SOURCE_KINDS`.
        kinds: the allowed schemes; `SOURCE_KINDS` by default.
        options: see `SourceOptions`.

    Raises:
        SourceError: the source delivers no image; the text names the remedy.
        SourceUriError: the URI itself is wrong.
    """
    parsed, kind = find_kind(uri, kinds)
    try:
        return kind.open(parsed, options)
    except ModuleNotFoundError as error:
        raise _missing(parsed, error) from error


def _missing(uri: SourceUri, error: ModuleNotFoundError) -> Exception:
    """Return what to raise for a library that is not installed: `error` itself for one of ours."""
    module = (error.name or "").partition(".")[0]
    if module not in _LIBRARIES:
        return error
    return SourceError(f"{uri.label}: {_LIBRARIES[module]} is missing; {remedy(module)}")


def is_live(uri: str, kinds: Mapping[str, SourceKind] | None = None) -> bool:
    """Return whether `uri` names a device, which may return after a loss, rather than a recording.
    Raises as `find_kind`."""
    return find_kind(uri, kinds)[1].live


def find_kind(
    text: str, kinds: Mapping[str, SourceKind] | None = None
) -> tuple[SourceUri, SourceKind]:
    """Return the parsed URI, and the kind of its source; raise SourceUriError for a wrong one."""
    uri = parse_source_uri(text)
    table = SOURCE_KINDS if kinds is None else kinds
    kind = table.get(uri.scheme)
    if kind is None:
        raise uri.wrong(f"unknown kind of source {did_you_mean(uri.scheme, tuple(table))}")
    kind.check(uri)
    return uri, kind


# The openers import late: OpenCV takes long to import, and a daemon without cameras has none of it.


def _open_file(uri: SourceUri, _: SourceOptions) -> FrameSource:
    uri.allow("loop", "fps")
    if uri.host not in {"", "localhost"}:
        raise uri.wrong(
            "a file:// source wants an absolute path; write "
            f"file://{Path.cwd() / (uri.host + uri.path)}"
        )
    path = Path(uri.path)
    loop, fps = uri.flag("loop"), uri.fps()
    try:
        if path.is_file():
            # OpenCV reports an unreadable file and a damaged file alike.
            path.open("rb").close()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES):
            from edge_server.cameras.recordings import open_images  # noqa: PLC0415 - OpenCV

            return open_images(path, fps=fps, loop=loop)
        if path.is_file():
            from edge_server.cameras.recordings import open_video  # noqa: PLC0415 - OpenCV

            return open_video(path, fps=fps, loop=loop)
        found = path.exists()
    except OSError as error:
        hint = home_hint(path)
        text = f"{path}: {error.strerror}; check the path and its rights{hint}"
        raise SourceError(text) from error
    if found:
        raise SourceError(f"{path}: is neither a file nor a folder; name a video or images")
    hint = "; options need the form file:///absolute/path?loop=true" if "?" in uri.path else ""
    raise SourceError(f"{path.absolute()}: no such file or folder; check the path{hint}")


def _open_mcap(uri: SourceUri, options: SourceOptions) -> FrameSource:
    from edge_server.cameras.mcap_file import open_mcap  # noqa: PLC0415 - may be missing

    return open_mcap(uri, options.useful)


def _check_mcap(uri: SourceUri) -> None:
    uri.allow("camera", "loop", "fps", "speed")
    if uri.host or not uri.path.startswith("/"):
        raise uri.wrong(
            "an mcap:// source wants an absolute path; write "
            f"mcap://{Path.cwd() / (uri.host + uri.path)}"
        )
    uri.fps()
    uri.speed()


def recorded_calibration(text: str) -> Calibration | None:
    """Return the calibration that the camera `text` had when it was recorded; None for other kinds
    of sources, and where it had none.

    Raises:
        SourceError: the recording cannot be read.
        SourceUriError: the URI is wrong.
    """
    uri = parse_source_uri(text)
    if uri.scheme != "mcap":
        return None
    _check_mcap(uri)
    try:
        from edge_server.cameras.mcap_file import chosen_camera  # noqa: PLC0415 - likewise
    except ModuleNotFoundError as error:
        raise _missing(uri, error) from error
    return chosen_camera(uri)[1]


def _open_synthetic(uri: SourceUri, _: SourceOptions) -> FrameSource:
    if uri.host != "road" or uri.path not in {"", "/"}:
        scene = uri.host + uri.path
        raise uri.wrong(f"unknown scene {did_you_mean(scene, ('road',))}")
    uri.allow("seed", "fps", "width", "height", "frames", "manoeuvres", "conditions")
    # By their names: the workshop lies above this room, and imports OpenCV.
    renderer = import_module("edge_server.tools.road.renderer")
    variants = import_module("edge_server.tools.road.variants").VARIANTS

    conditions = tuple(filter(None, uri.query.get("conditions", "").split(",")))
    for name in conditions:
        if name not in variants:
            raise uri.wrong(f"unknown condition {did_you_mean(name, tuple(variants))}")
    source: FrameSource = renderer.synthetic_road(
        seed=uri.whole("seed", 0, 0, 2**32 - 1),
        fps=uri.fps(),
        width=uri.whole("width", 1280, 64, 4096),
        height=uri.whole("height", 720, 64, 4096),
        frames=uri.whole("frames", 0, 0, 2**32 - 1),
        manoeuvres=uri.flag("manoeuvres"),
        conditions=conditions,
    )
    return source


def _open_live(uri: SourceUri, options: SourceOptions) -> FrameSource:
    from edge_server.cameras.gstreamer import open_live  # noqa: PLC0415 - OpenCV

    return open_live(uri, options)


def _library(options: SourceOptions) -> Future[Any] | None:
    return None if options.reader == "opencv" else loading_gstreamer()


# The checks know the options of both readers: a URI must not depend on which one reads it.


def _check_csi(uri: SourceUri) -> None:
    if not uri.host.isdecimal() or uri.path not in {"", "/"}:
        raise uri.wrong("name a sensor by its number: csi://0")
    uri.allow("mode", "width", "height", "fps", "flip")
    flip_of(uri)
    uri.whole("mode", 0, 0, 99)
    _check_size_and_fps(uri)


def _check_v4l2(uri: SourceUri) -> None:
    if uri.host or not uri.path.startswith("/"):
        device = f"/{uri.host}{uri.path}".rpartition("/")[2]
        number = device.removeprefix("video")
        right = f"/dev/video{number}" if number.isdecimal() else "/dev/video0"
        raise uri.wrong(f"names no device; write v4l2://{right}, or {right}")
    uri.allow("format", "width", "height", "fps", "flip")
    flip_of(uri)
    form = uri.query.get("format", "mjpeg")
    if form not in V4L2_FORMATS:
        raise uri.wrong(f"unknown format {did_you_mean(form, tuple(V4L2_FORMATS))}")
    _check_size_and_fps(uri)


def _check_size_and_fps(uri: SourceUri) -> None:
    uri.whole("width", 1280, 16, 16384)
    uri.whole("height", 720, 16, 16384)
    if uri.fps() == 0:
        raise uri.wrong("fps is 0; a live camera has a rate of its own")
    if ("width" in uri.query) != ("height" in uri.query):
        raise uri.wrong("width and height go together; write both or none")


def _check_rtsp(uri: SourceUri) -> None:
    _check_network(uri)
    transport = uri.query.get("transport", "tcp")
    if transport not in {"tcp", "udp"}:
        raise uri.wrong(f"transport is {transport!r}; write tcp or udp")


def _check_network(uri: SourceUri) -> None:
    if not uri.host:
        raise uri.wrong(f"has no host; write {uri.scheme}://HOST/path")


_live = partial(SourceKind, _open_live, live=True, library=_library)

SOURCE_KINDS: Mapping[str, SourceKind] = MappingProxyType(
    {
        "csi": _live(device=True, check=_check_csi),
        "v4l2": _live(device=True, check=_check_v4l2, look=look_for_device),
        "rtsp": _live(check=_check_rtsp, look=look_for_port),
        "rtsps": _live(check=_check_rtsp, look=look_for_port),
        "http": _live(check=_check_network, look=look_for_port),
        "https": _live(check=_check_network, look=look_for_port),
        "gst": _live(device=True),
        "file": SourceKind(_open_file, live=False),
        "mcap": SourceKind(_open_mcap, live=False, check=_check_mcap),
        "synthetic": SourceKind(_open_synthetic, live=False),
    }
)
