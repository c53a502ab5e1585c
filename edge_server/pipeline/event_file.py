"""EventFile: the newest events on disk, in one SQLite file that belongs to one daemon."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import sqlite3
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edge_server.errors import Unavailable
from edge_server.pipeline.events import Event
from edge_server.process.disk import error_of_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

_GREATEST_ID = 2**62
# The greatest id that was given or seen, beside the rows of readers.
GIVEN = "ids given"
# No file has more events: what of a damaged one cannot be read has no greater distance in ids.
_MOST_EVENTS = 100_000
_BLOCK_BYTES = 4096
# An event as `_encode` writes it.
_ROW = re.compile(rb'\{"kind":(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}')
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Kept(NamedTuple):
    """What a file holds.

    Attributes:
        events: in the order of their ids; without those that another version of this program wrote
            in a form that this one does not know.
        last_id: no event of the file has a greater id, whoever can read it.
        readers: the id up to which each reader has every event; see `GIVEN`.
    """

    events: list[Event]
    last_id: int
    readers: dict[str, int]


class EventFile:
    """The file of an event log; for one thread at a time.

    A file that is damaged is set aside, in place of an earlier one, and its readable events go on
    in a new one. Where the disk is full there is none until it is not.

    Args:
        path: its directory is the daemon's own.

    Raises:
        SettingsError, Unavailable: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._salvaged = Kept([], 0, {})
        try:
            self._open()
        except sqlite3.OperationalError as error:
            if "is full" not in str(error):
                raise Unavailable(
                    f"{path}: events cannot be kept there: {error}; if another daemon has the "
                    "file, give this one another events.file"
                ) from error
            log.error("events: %s: %s; they are kept in memory", path, error)  # noqa: TRY400 -- the text says it all
        except OSError as error:
            raise error_of_place(
                error, f"{path}: events cannot be kept there: {error.strerror}"
            ) from error

    def read(self) -> Kept:
        if self._database is None:
            return self._salvaged
        return _read(self._database)

    def renew(self) -> bool:
        """Make the file where there is none at its path, or another one; return whether that is so,
        and it has to be given all events.

        Raises:
            sqlite3.Error, OSError: it cannot be made now.
        """
        if self._database is not None:
            # SQLite would write on, for nobody.
            with contextlib.suppress(OSError):
                if self._identity == _identity(self._path):
                    return False
            log.error("events: %s was removed or replaced; it is written anew", self._path)
            self.close()
            # It belongs to the file that is gone.
            with contextlib.suppress(FileNotFoundError):
                self._path.with_name(f"{self._path.name}-wal").unlink()
        self._open()
        return True

    def store(self, events: Iterable[Event], readers: dict[str, int], kept: int) -> None:
        """Write events and readers, and forget all but the newest `kept` events.

        Raises:
            sqlite3.Error: nothing is written.
        """
        if self._database is None:
            raise sqlite3.OperationalError("there is no file")
        try:
            _store(self._database, events, readers, kept)
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self.close()  # `renew` looks at the file
            raise

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _open(self) -> None:
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        _finish_replacing(path)
        try:
            self._database = _connect(path)
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            if not _is_damage(error):
                raise
            self._salvaged = kept = _salvage(path)
            aside = _replace(path, kept)
            log.error(  # noqa: TRY400 -- the text says it all
                "events: %s is damaged (%s); it is now %s, and %d events of it go on",
                *(path, error, aside.name, len(kept.events)),
            )
            self._database = _connect(path)
        self._identity = _identity(path)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _is_damage(error: Exception) -> bool:
    """Whether the file is to blame: SQLite reports a sector that cannot be read as an I/O error."""
    return not isinstance(error, sqlite3.OperationalError) or "disk I/O error" in str(error)


def _salvage(path: Path) -> Kept:
    """Return what can be read of a damaged file.

    The bytes of an event are in the file as they were written, whatever became of the pages that
    lead to them; one longer than a page (4 kB) is not in one piece, and is lost. Where none is
    readable, ids go on above the seconds of the clock: no device has had so many events.
    """
    events: dict[int, Event] = {}
    last_id = 0
    wal = path.with_name(f"{path.name}-wal")
    for each in (*_set_aside(path), path, wal):
        for row in _ROW.findall(_readable(each)):
            try:
                found = msgspec.json.decode(row)
                id_ = found["id"]
                if not (isinstance(id_, int) and 0 < id_ < _GREATEST_ID):
                    continue
                last_id = max(last_id, id_)
                if each in (path, wal):
                    events[id_] = msgspec.convert(found, Event)
            except (ValueError, KeyError, RecursionError):
                continue
    last_id = (last_id or int(time.time())) + _MOST_EVENTS
    return Kept([events[id_] for id_ in sorted(events)], last_id, {GIVEN: last_id})


def _readable(path: Path) -> bytes:
    """Return what the disk gives of a file, with zeros for the rest; nothing of one that is not
    there."""
    blocks = []
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        for start in range(0, os.fstat(file.fileno()).st_size, _BLOCK_BYTES):
            try:
                blocks.append(os.pread(file.fileno(), _BLOCK_BYTES, start))
            except OSError:
                blocks.append(bytes(_BLOCK_BYTES))
    return b"".join(blocks)


def _replace(path: Path, kept: Kept) -> Path:
    """Set the file aside for one with `kept`; return its new path. A kill leaves the one or the
    other, or what `_finish_replacing` completes."""
    new = _new(path)
    for suffix in ("", "-journal"):
        new.with_name(new.name + suffix).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as file:
        _make_tables(file)
        _store(file, kept.events, kept.readers, _MOST_EVENTS)
    older = set(_set_aside(path))
    aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
    # The file before its log: a file without its log may look whole.
    for suffix in ("", "-wal", "-shm"):
        older.discard(renamed := aside.with_name(aside.name + suffix))
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(renamed)
    _finish_replacing(path)
    # A disk that damages file after file would be full of them.
    for each in older:
        with contextlib.suppress(OSError):
            each.unlink()
    return aside


def _finish_replacing(path: Path) -> None:
    if path.exists() or not _new(path).exists():
        return
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    _new(path).rename(path)


def _set_aside(path: Path) -> Iterator[Path]:
    """Yield the damaged files that are set aside, and what SQLite had beside them."""
    return path.parent.glob(f"{glob.escape(path.name)}.damaged-*")


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _connect(path: Path) -> sqlite3.Connection:
    # The worker writes; the daemon's main thread opens.
    file = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    # sqlite3's own would give damage the class of a busy file.
    file.text_factory = bytes.decode
    try:
        # Another daemon with the same file would give the same ids.
        file.execute("PRAGMA locking_mode=EXCLUSIVE")
        file.execute("PRAGMA journal_mode=WAL")
        file.execute("PRAGMA synchronous=FULL")
        _make_tables(file)
        _check(file)
    except BaseException:
        file.close()
        raise
    return file


def _make_tables(file: sqlite3.Connection) -> None:
    file.execute("CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, event BLOB)")
    file.execute("CREATE TABLE IF NOT EXISTS readers (name TEXT PRIMARY KEY, id INTEGER)")


def _store(
    file: sqlite3.Connection, events: Iterable[Event], readers: dict[str, int], kept: int
) -> None:
    with _transaction(file) as database:
        database.executemany(
            "INSERT OR REPLACE INTO events VALUES (?, ?)",
            ((event.id, _encode(event)) for event in events),
        )
        database.executemany("INSERT OR REPLACE INTO readers VALUES (?, ?)", readers.items())
        # Ids have gaps where a file was damaged.
        database.execute(
            "DELETE FROM events WHERE id <= "
            "(SELECT id FROM events ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (kept,),
        )


def _check(file: sqlite3.Connection) -> None:
    """Read all of the file: a brown-out leaves pages whose damage only their reader finds.

    Raises:
        sqlite3.DatabaseError, ValueError, TypeError: the file is damaged.
    """
    ((found,),) = file.execute("PRAGMA integrity_check(1)").fetchall()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    _read(file)


def _read(file: sqlite3.Connection) -> Kept:
    """Return the contents of a file.

    Raises:
        sqlite3.DatabaseError, ValueError, TypeError: the file is damaged.
    """
    events, last_id = [], 0
    for id_, row in file.execute("SELECT id, event FROM events ORDER BY id"):
        if not 0 < id_ < _GREATEST_ID:
            raise sqlite3.DatabaseError("an id is out of range")
        last_id = id_
        try:
            event = _decode(row)
        except msgspec.ValidationError:
            msgspec.json.decode(row)  # of another version, or no JSON at all
            continue
        if event.id != id_:
            raise sqlite3.DatabaseError("an event has another id than its row")
        events.append(event)
    readers: dict[str, int] = {}
    for name, id_ in file.execute("SELECT name, id FROM readers"):
        if not (isinstance(name, str) and isinstance(id_, int) and id_ < _GREATEST_ID):
            raise sqlite3.DatabaseError("a reader is no name with a number")
        readers[name] = id_
    last_id = max(last_id, readers.get(GIVEN, 0))
    return Kept(events, last_id, {name: min(id_, last_id) for name, id_ in readers.items()})


@contextlib.contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    file.execute("BEGIN IMMEDIATE")
    try:
        yield file
        file.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            file.execute("ROLLBACK")
        raise
