"""`edge-server recordings …`: what the recorder has written, and pictures out of it."""

from __future__ import annotations

import time
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

from edge_server.errors import SourceError
from edge_server.process.utf8 import shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path


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
    from edge_server.cameras.mcap_file import PictureRecords, cameras_in

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
    yield f"{count} pictures of camera {shown(camera)} in {folder}"
