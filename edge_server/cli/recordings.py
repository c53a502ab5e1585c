"""`edge-server recordings …`: what the recorder has written, and pictures out of it."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.installation import missing
from edge_server.cli.verbs import OK, Verbs
from edge_server.errors import SettingsError, SourceError
from edge_server.process.disk import state_directory
from edge_server.process.utf8 import shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_ABOUT = """\
The recordings of the recorder, MCAP files that Foxglove opens. A camera of mcap:///FILE plays one.
None of these verbs needs the daemon, or changes a recording.
"""
_CODES = """\
exit codes: 0 done, 2 usage, 69 a file cannot be read or written, 78 a library is missing,
130 interrupted
"""


def add_recording_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below `recordings`."""
    verbs = Verbs(parser, about=_ABOUT, codes=_CODES)

    listing = verbs.add("list", "the recordings of a directory, the oldest first", _list)
    where = "default: recordings in the state directory, as the daemon's"
    listing.add_argument("directory", nargs="?", type=Path, metavar="DIRECTORY", help=where)

    info = verbs.add("info", "what a recording has, and whether it is whole", _info)
    info.add_argument("file", type=Path, metavar="FILE")

    export = verbs.add("export", "the pictures of one camera, a JPEG each", _export)
    export.add_argument("file", type=Path, metavar="FILE")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="is made where it is missing")
    export.add_argument("--camera", metavar="NAME", help="needed where there are several")


def _list(arguments: argparse.Namespace) -> int:
    directory = arguments.directory or state_directory() / "recordings"
    try:
        files = sorted(path for path in directory.iterdir() if ".mcap" in path.suffixes)
        for path in files:
            with suppress(FileNotFoundError):  # the recorder removes the oldest meanwhile
                print(f"{path.stat().st_size / 1e6:10.1f} MB  {path}")
    except OSError as error:
        raise SourceError(f"{directory}: {error.strerror}; name the directory") from error
    return OK


def _info(arguments: argparse.Namespace) -> int:
    for line in _lines_of(arguments.file):
        print(shown(line))
    return OK


def _lines_of(path: Path) -> Iterator[str]:
    try:
        from edge_server.cameras.mcap_file import Records
    except ModuleNotFoundError as error:
        raise SettingsError(f"the library {missing(error)}") from error
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


def _export(arguments: argparse.Namespace) -> int:
    try:
        from edge_server.cameras.mcap_file import PictureRecords, cameras_in
    except ModuleNotFoundError as error:
        raise SettingsError(f"the library {missing(error)}") from error
    path: Path = arguments.file
    folder: Path = arguments.folder
    cameras = cameras_in(path)
    camera = arguments.camera or (next(iter(cameras)) if len(cameras) == 1 else "")
    if camera not in cameras:
        raise SourceError(f"{path}: choose one with --camera: {', '.join(map(shown, cameras))}")
    count = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in filter(attrgetter("jpeg"), PictureRecords(path, camera)):
            (folder / f"{count:06}.jpg").write_bytes(picture.jpeg)
            count += 1
    except OSError as error:
        raise SourceError(f"{error.filename or folder}: {error.strerror}") from error
    print(f"{count} pictures of camera {shown(camera)} in {folder}")
    return OK
