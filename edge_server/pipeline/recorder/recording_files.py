"""The directory of the recordings: their names, the space that they may take, what a crash left."""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_server.pipeline.recorder.mcap_writer import PART, RECOVERING, recover
from edge_server.process.disk import error_of_place, floor_bytes, free_bytes, lock_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

# The cause of a file that no event is about.
DRIVE = "drive"
_NAME = re.compile(r"(\d{8})-[0-9a-z]{1,8}-\d{8}T\d{6}Z-([a-z0-9_-]+)\.mcap(?:\.part)?")
_NO_WORD = re.compile(r"[^a-z0-9_-]+")
_LONGEST_CAUSE = 60
# Of what a file has beside its messages: chunk headers, indexes, the summary.
OVERHEAD_BYTES = 1 << 20


class RecordingFiles:
    """The recordings in a directory that is this daemon's alone; for one thread.

    Names have a number that counts the recordings, across restarts too, the boot, the time in UTC
    and the cause: they sort by age whatever the clock shows. Files that are of no event go first
    where space is needed, and the oldest first; files of events are kept longer, up to half of
    `most_bytes`. Other files in the directory are not touched.

    Args:
        directory: is made where it is missing.
        boot_id: of this boot.
        most_bytes: the recordings never take more, the one that is being written included.
        reserve_bytes: free space that they leave on the disk; see `floor_bytes`.
        free: returns the free bytes of the directory's disk.

    Raises:
        SettingsError, Unavailable: the directory cannot be made or written to, or is another
            daemon's.
    """

    def __init__(
        self,
        directory: Path,
        boot_id: str,
        *,
        most_bytes: int,
        reserve_bytes: int,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.directory = directory
        self.most_bytes = most_bytes
        self._boot = boot_id.replace("-", "")[:8]
        self._free = free
        self._sizes: dict[Path, int] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(directory)
            self._floor_bytes = floor_bytes(directory, reserve_bytes)
            for path in directory.iterdir():
                if path.name.endswith(RECOVERING):
                    path.unlink()
                elif _NAME.fullmatch(path.name):
                    self._sizes[path] = path.stat().st_size
        except BlockingIOError as error:
            raise error_of_place(
                error,
                f"recorder.directory: {directory}: another daemon records there; give this one "
                "a directory of its own",
            ) from error
        except OSError as error:
            raise error_of_place(
                error,
                f"recorder.directory: {directory}: {error.strerror}; give a directory that this "
                "user may write to",
            ) from error
        self._next = 1 + max((_number_of(path) for path in self._sizes), default=0)

    def close(self) -> None:
        os.close(self._lock)

    @property
    def used_bytes(self) -> int:
        """Of all whole recordings, and of those that a crash left."""
        return sum(self._sizes.values())

    def new_path(self, cause: str, epoch_s: float) -> Path:
        """Return the path of a new recording."""
        number, self._next = self._next, self._next + 1
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch_s))
        return self.directory / f"{number:08}-{self._boot}-{moment}-{as_cause(cause)}.mcap"

    def add(self, path: Path) -> None:
        """Count a recording that was just completed, or left."""
        with suppress(OSError):
            self._sizes[path] = path.stat().st_size

    def pin(self, path: Path, cause: str) -> None:
        """Keep a recording as one of an event; does nothing where it is one, or is gone."""
        if path not in self._sizes or _cause_of(path) != DRIVE:
            return
        pinned = path.with_name(with_cause(path.name, cause))
        with suppress(OSError):
            path.rename(pinned)
            self._sizes[pinned] = self._sizes.pop(path)

    def make_room(self, writing_bytes: int, more_bytes: int, keep: Path | None = None) -> str:
        """Delete recordings until `more_bytes` fit; return why they do not fit, or "".

        Args:
            writing_bytes: size of the file that is being written.
            more_bytes: what is to be written next.
            keep: a recording that is not deleted.

        Raises:
            OSError: the disk does not report its free space.
        """
        deletable: list[Path] | None = None
        while True:
            over = self.used_bytes + writing_bytes + more_bytes > self.most_bytes
            low = self._free(self.directory) < self._floor_bytes + more_bytes
            if not over and not low:
                return ""
            if deletable is None:
                # Somebody may have moved recordings to another machine.
                self._sizes = {path: size for path, size in self._sizes.items() if path.exists()}
                deletable = [path for path in self._deletable() if path != keep]
                continue
            if not deletable:
                if low:
                    return f"the disk has less than {self._floor_bytes >> 20} MiB free"
                return "the files of events take all of recorder.max_bytes"
            path = deletable.pop(0)
            with suppress(FileNotFoundError):
                path.unlink()
            del self._sizes[path]
            log.debug("recorder: %s deleted, to make room", path.name)

    def try_writing(self) -> None:
        """Write a block, and remove it.

        Raises:
            OSError: the disk is full, or failed.
        """
        path = self.directory / ".try"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()

    def recover(self) -> None:
        """Make whole recordings of those that a crash left; a fault of the disk leaves them, and so
        does a disk without room for a second one of its size."""
        for part in sorted(path for path in self._sizes if path.name.endswith(PART)):
            try:
                if reason := self.make_room(0, self._sizes[part] + OVERHEAD_BYTES, keep=part):
                    log.error("recorder: %s: not recovered now: %s", part.name, reason)
                    continue
                whole = recover(part)
            except OSError as error:
                log.error("recorder: %s: cannot be recovered: %s", part.name, error.strerror)  # noqa: TRY400 -- the text says it all
                continue
            del self._sizes[part]
            if whole is not None:
                self.add(whole)
                log.info("recorder: %s: recovered, %d bytes", whole.name, self._sizes[whole])

    def _deletable(self) -> list[Path]:
        """Return the recordings that may go, in their order: those of no event, then those of
        events beyond half of the space."""
        by_age = sorted(self._sizes, key=_number_of)
        unpinned = [path for path in by_age if _cause_of(path) == DRIVE]
        left = self.most_bytes // 2
        beyond: list[Path] = []
        for path in reversed(by_age):
            if _cause_of(path) != DRIVE:
                left -= self._sizes[path]
                if left < 0:
                    beyond.insert(0, path)
        return unpinned + beyond


def as_cause(text: str) -> str:
    """Return `text` as a name may have it."""
    return _NO_WORD.sub("-", text.lower()).strip("-")[:_LONGEST_CAUSE] or "unknown"


def with_cause(name: str, cause: str) -> str:
    """Return the name of a recording with another cause."""
    number, boot, moment, _ = name.split("-", 3)
    return f"{number}-{boot}-{moment}-{as_cause(cause)}.mcap"


def _number_of(path: Path) -> int:
    return int(path.name[:8])


def _cause_of(path: Path) -> str:
    found = _NAME.fullmatch(path.name)
    return "" if found is None else found[2]
