"""`edge-server cameras` and `recordings`: which cameras are there, what one gives; what the
recorder has written, and pictures of both."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.gstreamer import gstreamer_missing, why_opencv
from edge_server.cameras.opencv_settings import opencv_report
from edge_server.cameras.recordings import write_picture
from edge_server.cameras.source import is_live, open_source
from edge_server.cameras.source_uri import SourceOptions, parse_source_uri, read_credentials
from edge_server.cameras.v4l2 import VideoDevice, video_devices
from edge_server.cli.run import settings_of
from edge_server.cli.tables import answer, size_text, table
from edge_server.errors import SourceError
from edge_server.pixels import PixelFormat
from edge_server.process.disk import installed_state
from edge_server.process.text import masked, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from edge_server.cameras.frame import Frame, FrameSource
    from edge_server.cameras.v4l2 import VideoMode

_KINDS = ("csi", "v4l2", "rtsp", "http")


def plugged_in(arguments: argparse.Namespace, devices: Path = Path("/dev")) -> Iterable[str]:
    """Return lines about the cameras below `devices`, or one JSON object."""
    found = list(video_devices(devices))
    cameras = [each for each in found if isinstance(each, VideoDevice)]
    faults = [str(each) for each in found if isinstance(each, SourceError)]
    uris = _uris(cameras)
    gstreamer = {kind: gstreamer_missing(kind) for kind in _KINDS}
    opencv = opencv_report()
    report = {
        "cameras": list(map(_object, uris, cameras)),
        "faults": faults,
        "readers": {
            "gstreamer": {kind: missing or None for kind, missing in gstreamer.items()},
            "opencv": opencv,
        },
    }
    lines = [
        *_cameras(uris, cameras),
        *(f"fault: {fault}" for fault in faults),
        *_readers(gstreamer, opencv),
    ]
    if not found:
        lines.insert(0, f"no camera in {devices}; cameras in the network are not searched for")
    return answer(arguments, report, lines)


def _cameras(uris: Sequence[str], cameras: Sequence[VideoDevice]) -> Iterator[str]:
    for uri, camera in zip(uris, cameras, strict=True):
        yield f"{uri}  {camera.name} ({camera.driver})"
        for line in _modes(camera.modes):
            yield f"    {line}"
        if camera.other_formats and not uri.startswith("csi:"):
            yield f"    also {', '.join(camera.other_formats)}, which neither reader takes"


def _uris(cameras: Sequence[VideoDevice]) -> list[str]:
    """Return the URI of each camera: of a CSI sensor by its number among them, which is how Argus
    counts (not seen on a board)."""
    # The driver of Tegra's CSI receiver names its devices like `vi-output, imx219 9-0010`.
    csi = [each.path for each in cameras if each.name.startswith("vi-output")]
    return [f"csi://{csi.index(each.path)}" if each.path in csi else each.path for each in cameras]


def _modes(modes: Sequence[VideoMode]) -> Iterator[str]:
    """Yield a line for each format, with its sizes and their highest rate."""
    for form, group in groupby(sorted(modes, key=lambda mode: mode.format), lambda m: m.format):
        sizes: dict[tuple[int, int], float] = {}
        for mode in group:
            sizes[mode.size] = max(float(mode.fps), sizes.get(mode.size, 0.0))
        texts = (
            f"{size[0]} x {size[1]} at {fps:g}" for size, fps in sorted(sizes.items(), reverse=True)
        )
        yield f"{form}: {', '.join(texts)} fps"


def _readers(gstreamer: dict[str, str], opencv: dict[str, Any]) -> Iterator[str]:
    reasons = set(gstreamer.values())
    if len(reasons) == 1:
        (reason,) = reasons
        yield f"GStreamer: {reason or 'reads every kind of camera'}"
    else:
        for kind, missing in gstreamer.items():
            yield f"GStreamer, {kind}: {missing or 'can be read'}"
    backends = ", ".join(opencv["backends"]) or "neither FFmpeg nor V4L2, so it reads no camera"
    yield f"OpenCV {opencv['version']}: {backends}"


def _object(uri: str, camera: VideoDevice) -> dict[str, Any]:
    modes = []
    for mode in camera.modes:
        width, height = mode.size
        fps = round(float(mode.fps), 3)
        modes.append({"format": mode.format, "width": width, "height": height, "fps": fps})
    return {"uri": uri, **asdict(camera), "modes": modes}


# A longer interval between two captures than this many usual ones counts as a gap.
_GAP_PERIODS = 1.5


@dataclass
class Measured:
    """What a source gave.

    Attributes:
        opened_s: until its first frame could be read.
        arrivals_ns: CLOCK_MONOTONIC of each frame.
        captures_ns: likewise, as the source knows it.
    """

    opened_s: float
    arrivals_ns: list[int] = field(default_factory=list)
    captures_ns: list[int] = field(default_factory=list)
    last: Frame | None = None
    ended: bool = False
    failure: SourceError | None = None


def probe(arguments: argparse.Namespace) -> Iterator[str]:
    """Open a source, read it for some seconds, yield what it gives."""
    uri, file, picture = arguments.uri, arguments.credentials, arguments.picture
    credentials = None if file is None else read_credentials(file)
    options = SourceOptions(credentials=credentials, reader=arguments.reader)
    by = reader_of(uri, arguments.reader)
    begun = time.monotonic()
    source = open_source(uri, options=options)
    try:
        measured = measure(source, arguments.seconds, time.monotonic() - begun)
        label = parse_source_uri(uri).label
        if measured.last is None:
            raise measured.failure or SourceError(f"{label}: ends without a frame")
        facts = {"source": label, "reader": by, **facts_of(measured, source)}
        if picture is not None:
            write_picture(picture, bgr_of(measured.last.image))
            facts["picture"] = str(picture.absolute())
    finally:
        source.close()
    if arguments.json:
        yield masked(json.dumps(facts, indent=2))
    else:
        for key, value in facts.items():
            yield masked(f"{key.replace('_', ' '):16} {_in_words(value)}")
    if measured.failure is not None:
        raise measured.failure


def _in_words(value: Any) -> str:
    if value is None:
        return "not known"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def reader_of(uri: str, wanted: Literal["auto", "gstreamer", "opencv"]) -> str:
    """Return who reads `uri`, and why it is not GStreamer where it is not."""
    if not is_live(uri):
        return "of recordings"
    why = why_opencv(parse_source_uri(uri), wanted)
    if not why:
        return "GStreamer"
    version = f"OpenCV {opencv_report()['version']}"
    return version if wanted == "opencv" else f"{version}, {why}"


def measure(
    source: FrameSource,
    seconds: float,
    opened_s: float,
    monotonic_ns: Callable[[], int] = time.monotonic_ns,
) -> Measured:
    """Read `source` for `seconds`, or until it ends or fails."""
    measured = Measured(opened_s)
    end_ns = monotonic_ns() + int(seconds * 1e9)
    while monotonic_ns() < end_ns:
        try:
            frame = source.read()
        except SourceError as error:
            measured.failure = error
            break
        if frame is None:
            measured.ended = True
            break
        measured.last = frame
        measured.arrivals_ns.append(monotonic_ns())
        measured.captures_ns.append(frame.capture_mono_ns)
    return measured


def facts_of(measured: Measured, source: FrameSource) -> dict[str, Any]:
    """Return what people want to know of a camera, by name; at least one frame was measured."""
    frame = measured.last
    assert frame is not None  # noqa: S101  # for the type checker: the caller has looked
    image = frame.image
    spanned_s = (measured.arrivals_ns[-1] - measured.arrivals_ns[0]) / 1e9
    count = len(measured.arrivals_ns)
    pairs = zip(measured.arrivals_ns, measured.captures_ns, strict=True)
    ages_ms = [(arrival - capture) / 1e6 for arrival, capture in pairs]
    captures = measured.captures_ns
    intervals = [after - before for before, after in pairwise(captures)]
    usual = statistics.median(intervals) if intervals else 0
    facts: dict[str, Any] = {
        "format": image.pixel_format.value,
        "size": "{} x {}".format(*frame.size),
    }
    if image.pixel_format is not PixelFormat.BGR:
        facts["colour"] = f"{image.colour.matrix.value}, {image.colour.range.value} range"
    return facts | {
        "frames": count,
        "fps": round((count - 1) / spanned_s, 2) if spanned_s else None,
        "opened_after_s": round(measured.opened_s, 2),
        "clock": frame.clock,
        "age_ms_median": round(statistics.median(ages_ms), 1),
        "age_ms_longest": round(max(ages_ms), 1),
        "gaps": sum(interval > _GAP_PERIODS * usual for interval in intervals),
        "damaged": getattr(source, "corrupt", None),
        "ended": measured.ended,
    }


def listed(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each recording in a folder, the newest first."""
    section = settings_of(arguments).recorder
    folder = arguments.folder or Path(section.directory or installed_state() / "recordings")
    try:
        # The names sort by age.
        files = sorted((path for path in folder.iterdir() if path.suffix == ".mcap"), reverse=True)
        rows = [(size_text(path.stat().st_size), shown(str(path))) for path in files]
    except OSError as error:
        raise SourceError(
            f"{folder}: {error.strerror}; name the folder, or with --config the settings that have "
            "it in [recorder] directory"
        ) from error
    yield from table([("SIZE", "FILE"), *rows], left=(1,)) if rows else (f"{folder}: no recording",)


def info(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what a recording has, and whether it is whole."""
    return map(shown, _lines_of(arguments.file))


def _lines_of(path: Path) -> Iterator[str]:
    from edge_server.cameras.mcap_file import Records

    records = Records(path)
    counts: Counter[str] = Counter()
    times: list[int] = []
    try:
        for _, channel, message in records:
            counts[channel.topic] += 1
            times.append(message.publish_time)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; check the path and its rights") from error
    for name, about in records.metadata.items():
        yield f"{name}: " + ", ".join(f"{key} {value}" for key, value in about.items() if value)
    if times:
        began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(min(times) / 1e9))
        yield f"from {began}, {(max(times) - min(times)) / 1e9:.1f} s"
    for topic, count in sorted(counts.items()):
        yield f"{count:8d}  {topic}"
    yield f"breaks off: {records.damage}" if records.damage else "whole"


def export(arguments: argparse.Namespace) -> Iterator[str]:
    """Write the pictures of a camera; yield their number."""
    from edge_server.cameras.mcap_file import Records, cameras_in, pictures_of

    path: Path = arguments.file
    folder: Path = arguments.folder
    cameras = cameras_in(path)
    camera = arguments.camera or (next(iter(cameras)) if len(cameras) == 1 else "")
    if camera not in cameras:
        raise SourceError(f"{path}: choose one with --camera: {', '.join(map(shown, cameras))}")
    count = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in filter(attrgetter("jpeg"), pictures_of(Records(path), camera)):
            (folder / f"{count:06}.jpg").write_bytes(picture.jpeg)
            count += 1
    except OSError as error:
        raise SourceError(f"{error.filename or folder}: {error.strerror}") from error
    yield f"{count} pictures of camera {shown(camera)} in {folder}"
