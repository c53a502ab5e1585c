"""EventLog: events get their ids here, survive restarts, and are read in order by every reader."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from edge_server.errors import SettingsError, Unavailable
from edge_server.pipeline.events import Event
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

# About 300 bytes each, in memory and on disk.
KEPT = 1000
_STEP_S = 0.2
_RETRY_S = 5.0
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


@dataclass(eq=False)
class Ticket:
    """Stands for an event whose id is not known yet; the event that ends it refers to it."""

    id: int = 0


class EventLog:
    """The newest events of the device, in the order of their ids; safe from any thread.

    An event is visible once it is durable. While the disk takes nothing, events are visible all the
    same and are written later; if the daemon dies before, its successor gives their ids again.

    Args:
        path: the file; its directory is the daemon's own. None keeps events in memory only.
        kept: number of events; the oldest are forgotten.

    Raises:
        SettingsError, Unavailable: the file cannot be made. A file that is damaged is set aside,
            and the ids begin at 1 again.
    """

    def __init__(self, path: Path | None = None, *, kept: int = KEPT) -> None:
        self.worker = Worker("events", self._tick, on_end=self._end)
        self.dropped = 0  # events forgotten before any disk or reader had them
        self._kept = kept
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Event, Ticket, Ticket | None]] = deque()
        self._events: deque[Event] = deque(maxlen=kept)
        self._unwritten: deque[Event] = deque(maxlen=kept)
        self._readers: dict[str, int] = {}
        self._written_readers: dict[str, int] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._retry_at = 0.0
        self._failure = ""
        self._file = None if path is None else _open(path)
        if self._file is not None:
            self._read(self._file)

    @property
    def newest(self) -> int:
        """The id of the newest visible event; 0 where there is none."""
        with self._changed:
            return self._events[-1].id if self._events else 0

    def put(self, event: Event, ends: Ticket | None = None) -> Ticket:
        """Add an event; returns at once.

        Args:
            event: its `id` and `begin_id` are given here.
            ends: of the event that began what this one ends.
        """
        ticket = Ticket()
        with self._changed:
            if len(self._arrived) >= self._kept:
                self._arrived.popleft()
                self.dropped += 1
            self._arrived.append((event, ticket, ends))
            self._changed.notify_all()
        return ticket

    def after(self, id_: int) -> list[Event]:
        """Return the kept events with greater ids, the oldest first."""
        with self._changed:
            return [event for event in self._events if event.id > id_]

    def wait_after(
        self, id_: int, timeout_s: float | None = None, ended: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until there is an event with a greater id; return whether there is.

        Args:
            id_: see `after`.
            timeout_s: None is no limit.
            ended: ends the wait; looked at after `wake`.
        """

        def is_there() -> bool:
            return bool(self._events) and self._events[-1].id > id_

        with self._changed:
            self._changed.wait_for(lambda: is_there() or ended(), timeout_s)
            return is_there()

    def wake(self) -> None:
        """Have every `wait_after` look at its `ended`."""
        with self._changed:
            self._changed.notify_all()

    def when_visible(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the log's thread whenever there are new events; before its start."""
        self._callbacks.append(callback)

    def acknowledge(self, reader: str, id_: int) -> None:
        """Keep, across restarts, that `reader` has every event up to `id_`."""
        with self._changed:
            self._readers[reader] = max(id_, self._readers.get(reader, 0))

    def acknowledged(self, reader: str) -> int:
        """Return the id up to which `reader` has every event; 0 for a new reader."""
        with self._changed:
            return self._readers.get(reader, 0)

    # The methods below run on the worker, or before it starts.

    def _tick(self, now: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrived), _STEP_S)
            arrived, self._arrived = self._arrived, deque()
            readers = dict(self._readers)
        self._give_ids(arrived)
        # A disk that hangs delays events, and nothing else.
        with self.worker.allowing(math.inf):
            self._write(readers, now)

    def _give_ids(self, arrived: deque[tuple[Event, Ticket, Ticket | None]]) -> None:
        newest = self._unwritten[-1].id if self._unwritten else self.newest
        for id_, (event, ticket, ends) in zip(count(newest + 1), arrived, strict=False):
            ticket.id = id_
            self._unwritten.append(replace(event, id=id_, begin_id=ends.id if ends else 0))

    def _write(self, readers: dict[str, int], now: float) -> None:
        """Write what is not written, and make it visible in any case."""
        visible = self.newest
        new = [event for event in self._unwritten if event.id > visible]
        has_news = bool(self._unwritten) or readers != self._written_readers
        if self._file is not None and has_news and (new or now >= self._retry_at):
            try:
                _store(self._file, self._unwritten, readers, self._kept)
            except sqlite3.Error as error:
                self._retry_at = now + _RETRY_S
                self._note(f"cannot be written: {error}; they are kept in memory")
            else:
                self._unwritten.clear()
                self._written_readers = readers
                self._note("")
        elif self._file is None:
            self._unwritten.clear()
        if new:
            with self._changed:
                self._events.extend(new)
                self._changed.notify_all()
            for callback in self._callbacks:
                callback()

    def _note(self, failure: str) -> None:
        """Log a change of the disk's state once."""
        if failure.partition(":")[0] != self._failure.partition(":")[0]:
            if failure:
                log.error("events: %s", failure)
            else:
                log.info("events: written again")
            self._failure = failure

    def _read(self, file: sqlite3.Connection) -> None:
        rows = file.execute("SELECT event FROM events ORDER BY id").fetchall()
        self._events.extend(_decode(row) for (row,) in rows)
        self._readers = dict(file.execute("SELECT name, id FROM readers").fetchall())
        self._written_readers = dict(self._readers)

    def _end(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
            readers = dict(self._readers)
        self._give_ids(arrived)
        self._write(readers, math.inf)
        if self._file is not None:
            with contextlib.suppress(sqlite3.Error):
                self._file.close()


def _open(path: Path) -> sqlite3.Connection:
    """Return the open file; a damaged one is set aside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _connect(path)
        except (sqlite3.DatabaseError, msgspec.MsgspecError, TypeError) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
            log.error("events: %s is damaged (%s); it is now %s", path, error, aside.name)  # noqa: TRY400 -- the text says it all
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(f"{aside}{suffix}")
            return _connect(path)
    except sqlite3.OperationalError as error:
        raise Unavailable(
            f"{path}: events cannot be kept there: {error}; if another daemon has the file, give "
            "this one another events.file"
        ) from error
    except OSError as error:
        raise SettingsError(f"{path}: events cannot be kept there: {error.strerror}") from error


def _connect(path: Path) -> sqlite3.Connection:
    # The worker writes; the daemon's main thread opens.
    file = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
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
        sqlite3.DatabaseError, msgspec.MsgspecError, TypeError: the file is damaged.
    """
    ((found,),) = file.execute("PRAGMA integrity_check(1)").fetchall()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    for (row,) in file.execute("SELECT event FROM events"):
        _decode(row)
    for name, id_ in file.execute("SELECT name, id FROM readers"):
        if not (isinstance(name, str) and isinstance(id_, int)):
            raise sqlite3.DatabaseError("a reader is no name with a number")


@contextlib.contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
        file.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            file.execute("ROLLBACK")
        raise


def _store(
    file: sqlite3.Connection, events: deque[Event], readers: dict[str, int], kept: int
) -> None:
    with _transaction(file):
        file.executemany(
            "INSERT OR REPLACE INTO events VALUES (?, ?)",
            ((event.id, _encode(event)) for event in events),
        )
        file.executemany("INSERT OR REPLACE INTO readers VALUES (?, ?)", readers.items())
        file.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (kept,))
