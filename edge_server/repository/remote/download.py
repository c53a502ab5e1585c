"""Downloads that go on where a cut connection, or an interrupted pull, has left them."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, Unavailable
from edge_server.process.backoff import Backoff
from edge_server.process.disk import file_sha256
from edge_server.repository.remote.origin import ConnectionCut
from edge_server.repository.transfer.swap import writing
from edge_server.repository.tree import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.repository.remote.origin import RemoteFile

# Attempts in a row that have brought nothing.
_MOST_ATTEMPTS = 5


def download(
    file: RemoteFile,
    target: Path,
    progress: Callable[[int], None],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Return once `target` holds the content of `file`, checked against its digest.

    What has come of it lies in `.part` beside it until then, across attempts and across processes.

    Args:
        file: the file.
        target: is complete if it exists.
        progress: called with the number of bytes after each piece.
        sleep: waits so many seconds, between attempts.

    Raises:
        ModelConfigError: the content has another digest, or is larger than it may be; nothing of
            it is kept.
        Unavailable: the connection breaks again and again; what has come is kept.
        InternalError: the disk is full or refuses the file.
    """
    if target.exists():
        return
    part, tag_file = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.tag")
    backoff = Backoff(0.5, 8.0)
    left = _MOST_ATTEMPTS
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch(file, part, tag_file, progress)
            break
        except ConnectionCut as error:
            now = part.stat().st_size if part.exists() else 0
            left = _MOST_ATTEMPTS if now > before else left - 1
            if now > before:
                backoff.reset()
            if not left:
                raise Unavailable(
                    f"{file.path}: {error}; {now} bytes are kept, the next pull goes on there"
                ) from error
            sleep(backoff.next_s())
    found = file_sha256(part)
    if found != file.sha256:
        part.unlink()
        raise ModelConfigError(
            f"{file.path}: has sha256 {found}, not {file.sha256}; nothing of it was taken"
        )
    with writing(part):
        part.rename(target)
        tag_file.unlink(missing_ok=True)


def _fetch(file: RemoteFile, part: Path, tag_file: Path, progress: Callable[[int], None]) -> None:
    most = MOST_BYTES if file.size is None else file.size
    offset = part.stat().st_size if part.exists() else 0
    if file.size is not None and offset == file.size:
        return
    tag = tag_file.read_text() if offset and tag_file.exists() else ""
    body = file.open(offset if tag else 0, tag)
    size = body.size
    if size is not None and size > most:
        raise ModelConfigError(f"{file.path}: has {size} bytes, more than {most}")
    with writing(part):
        if shutil.disk_usage(part.parent).free < (size or 0) - body.offset:
            raise Unavailable(
                f"{part.parent}: no space for {size} bytes; free some, or set XDG_CACHE_HOME to a "
                "directory on another disk"
            )
        tag_file.write_text(body.tag)
        with part.open("r+b" if body.offset else "wb") as out:
            out.seek(body.offset)
            out.truncate()
            at = body.offset
            for piece in body.pieces:
                at += len(piece)
                if at > most:
                    out.truncate(0)
                    raise ModelConfigError(f"{file.path}: more than {most} bytes came")
                out.write(piece)
                progress(len(piece))
    if size is not None and at < size:
        raise ConnectionCut(f"the connection ended at byte {at} of {size}")
