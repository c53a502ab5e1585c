"""EventFile: the newest events on disk, in one SQLite file that belongs to one daemon."""

from __future__ import annotations

import contextlib
import logging
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
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Kept(NamedTuple):
    """What a file holds.

    Attributes:
        events: in the order of their ids; without those that another version of this program wrote
            in a form that this one does not know.
        last_id: the greatest id that was given, whoever can read its event.
        readers: the id up to which each reader has every event.
    """

    events: list[Event]
    last_id: int
    readers: dict[str, int]


class EventFile:
    """The file of an event log; for one thread at a time.

    A file that is damaged is set aside. Where the disk is full there is none until it is not.

    Args:
        path: its directory is the daemon's own.

    Raises:
        SettingsError, Unavailable: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._identity = (0, 0)
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
            return Kept([], 0, {})
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
        with _transaction(self._database) as database:
            database.executemany(
                "INSERT OR REPLACE INTO events VALUES (?, ?)",
                ((event.id, _encode(event)) for event in events),
            )
            database.executemany("INSERT OR REPLACE INTO readers VALUES (?, ?)", readers.items())
            database.execute(
                "DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (kept,)
            )

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _open(self) -> None:
        self._database = _connect_anew(self._path)
        self._identity = _identity(self._path)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _connect_anew(path: Path) -> sqlite3.Connection:
    """Return the open file; a damaged one is set aside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _connect(path)
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        log.error("events: %s is damaged (%s); it is now %s", path, error, aside.name)  # noqa: TRY400 -- the text says it all
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(f"{aside}{suffix}")
        return _connect(path)


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
        file.execute("CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, event BLOB)")
        file.execute("CREATE TABLE IF NOT EXISTS readers (name TEXT PRIMARY KEY, id INTEGER)")
        _check(file)
    except BaseException:
        file.close()
        raise
    return file


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
    readers = {}
    for name, id_ in file.execute("SELECT name, id FROM readers"):
        if not (isinstance(name, str) and isinstance(id_, int)):
            raise sqlite3.DatabaseError("a reader is no name with a number")
        readers[name] = min(id_, last_id)
    return Kept(events, last_id, readers)


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
