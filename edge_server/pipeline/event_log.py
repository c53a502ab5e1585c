"""EventLog: events get their ids here, survive restarts, and are read in order by every reader."""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import re
import secrets
import sqlite3
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from edge_server.errors import Unavailable
from edge_server.process.disk import error_of_place
from edge_server.process.utf8 import as_utf8
from edge_server.process.worker import Worker
from edge_server.settings.sections import EventKind  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

EventPhase = Literal["begin", "end", "instant"]


@dataclass(frozen=True)
class Event:
    """One event, as `edge/lanes/v1/events.proto` describes it.

    Attributes:
        id: counts the events of `log`, across restarts too; 0 before the event log has given it.
        begin_id: the id of the event that began what this one ends.
        camera: empty where the event is of no camera.
        frame_id: of the frame that caused the event.
        cause: a word.
        text: the same for people.
        distance_to_line_m: of a departure; negative beyond the line.
        log: the identity of the event log, which gives it with the id.
    """

    kind: EventKind
    phase: EventPhase
    cause: str
    text: str
    mono_ns: int
    epoch_ns: int
    id: int = 0
    begin_id: int = 0
    camera: str = ""
    frame_id: int | None = None
    model: str = ""
    model_version: str = ""
    distance_to_line_m: float | None = None
    time_to_line_s: float | None = None
    log: str = ""


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


# About 350 bytes each on disk and 900 in memory: those of a minute without a broker, and of the
# longest delay of its publisher's back-off, at 50 a second, twice.
KEPT = 10_000
# The reason of a model that cannot serve may be as long as its library pleases.
_LONGEST_TEXT = 2000
_STEP_S = 1.0
_RETRY_S = 5.0


@dataclass(eq=False)
class Ticket:
    """Stands for an event whose id is not known yet; the event that ends it refers to it."""

    id: int = 0


class EventLog:
    """The newest events of the device, in the order of their ids; safe from any thread.

    A log has an identity, which each of its events has too: a reader that finds another one starts
    over, as the ids of two logs say nothing of each other. It lasts as long as the events do: over
    restarts, and over damage of the file that leaves one event readable. Ids go on above all that
    were given, so that readers which know nothing of identities miss nothing either.

    An event is visible once it is durable. While the disk takes nothing, events are visible all the
    same and are written later; if the daemon dies before, its successor gives their ids again.

    Args:
        path: the file; its directory is the daemon's own. None keeps events in memory only.
        kept: number of events; the oldest are forgotten.

    Attributes:
        id: the identity of the log.
        earlier: no event of an earlier run has a greater id: what it began, nobody ends.

    Raises:
        SettingsError, Unavailable: the file cannot be made. One that is damaged is set aside after
            its readable events were copied; one that is removed or replaced while it is open is
            written anew.
    """

    def __init__(self, path: Path | None = None, *, kept: int = KEPT) -> None:
        self.worker = Worker("events", self._tick, on_end=self._end)
        self.dropped = 0  # events forgotten before any disk or reader had them
        self._counts: Counter[tuple[str, str]] = Counter()
        self._kept = kept
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Event, Ticket, Ticket | None]] = deque()
        self._events: deque[Event] = deque(maxlen=kept)
        self._unwritten: deque[Event] = deque(maxlen=kept)
        self._readers: dict[str, int] = {}
        self._written_readers: dict[str, int] = {}
        self._callbacks: tuple[Callable[[], object], ...] = ()  # replaced, never changed
        self._retry_at = 0.0
        self._failure = ""
        self._last_id = 0
        self._file = None if path is None else EventFile(path)
        if self._file is not None:
            found = self._file.read()
            self._events.extend(found.events)
            self._last_id = found.last_id
            self._readers, self._written_readers = dict(found.readers), dict(found.readers)
        self.earlier = self._last_id
        logs = (event.log for event in reversed(self._events) if event.log)
        self.id = next(logs, "") or secrets.token_hex(8)
        if any(not event.log for event in self._events):  # of an earlier version of this program
            self._events = deque((replace(e, log=self.id) for e in self._events), maxlen=kept)
            self._unwritten.extend(self._events)

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
        # Other texts than ours may hold the bytes of any file name.
        event = replace(
            event,
            cause=as_utf8(event.cause),
            text=as_utf8(event.text[:_LONGEST_TEXT]),
            model=as_utf8(event.model),
            model_version=as_utf8(event.model_version),
        )
        ticket = Ticket()
        with self._changed:
            if len(self._arrived) >= self._kept:
                self._arrived.popleft()
                self.dropped += 1
            self._arrived.append((event, ticket, ends))
            if event.phase != "end":
                self._counts[event.kind, event.cause] += 1
            self._changed.notify_all()
        return ticket

    def counts(self) -> dict[tuple[str, str], int]:
        """Return (kind, cause) → number of events since the start, without those that end one."""
        with self._changed:
            return dict(self._counts)

    def after(self, id_: int) -> list[Event]:
        """Return the kept events with greater ids, the oldest first."""
        with self._changed:
            return [event for event in self._events if event.id > id_]

    def next_after(self, id_: int) -> Event | None:
        """Return the oldest kept event with a greater id; None where there is none."""
        with self._changed:
            index = bisect_right(self._events, id_, key=lambda event: event.id)
            return self._events[index] if index < len(self._events) else None

    def wait_after(self, id_: int, ended: Callable[[], bool]) -> bool:
        """Wait until there is an event with a greater id; return whether there is.

        Args:
            id_: see `after`.
            ended: ends the wait; looked at after `wake`.
        """

        def is_there() -> bool:
            return bool(self._events) and self._events[-1].id > id_

        with self._changed:
            self._changed.wait_for(lambda: is_there() or ended())
            return is_there()

    def wake(self) -> None:
        """Have every `wait_after` look at its `ended`."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Write what has arrived, wait for that, and close the file."""
        self.worker.ask_to_stop()
        self.wake()
        self.worker.stop()

    def when_visible(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the log's thread whenever there are new events, from now on."""
        with self._changed:
            self._callbacks = (*self._callbacks, callback)

    def acknowledge(self, reader: str, id_: int) -> None:
        """Keep, across restarts, that `reader` has every event up to `id_`."""
        with self._changed:
            self._readers[reader] = max(id_, self._readers.get(reader, 0))

    def acknowledged(self, reader: str) -> int:
        """Return the id up to which `reader` has every event; 0 for a new reader."""
        with self._changed:
            return self._readers.get(reader, 0)

    def continue_above(self, id_: int) -> None:
        """Give greater ids than `id_`, which a reader has had, to all events to come."""
        with self._changed:
            self._last_id = max(self._last_id, id_)
            self._readers[GIVEN] = self._last_id

    # The methods below run on the worker, or before it starts.

    def _tick(self, now: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self.worker.stopping, _STEP_S)
            arrived, self._arrived = self._arrived, deque()
            readers = dict(self._readers)
        self._give_ids(arrived)
        # A disk that hangs delays events, and nothing else.
        with self.worker.allowing(math.inf):
            self._write(readers, now)

    def _give_ids(self, arrived: deque[tuple[Event, Ticket, Ticket | None]]) -> None:
        with self._changed:
            for event, ticket, ends in arrived:
                self._last_id += 1
                ticket.id = self._last_id
                begin_id = ends.id if ends else 0
                given = replace(event, id=ticket.id, begin_id=begin_id, log=self.id)
                self._unwritten.append(given)

    def _write(self, readers: dict[str, int], now: float) -> None:
        """Write what is not written, and make it visible in any case."""
        visible = self.newest
        new = [event for event in self._unwritten if event.id > visible]
        has_news = bool(self._unwritten) or readers != self._written_readers
        if self._file is not None and has_news and (new or now >= self._retry_at):
            try:
                if self._file.renew():
                    every = {event.id: event for event in (*self._events, *self._unwritten)}
                    self._unwritten.extend(every.values())
                self._file.store(self._unwritten, readers, self._kept)
            except (sqlite3.Error, OSError) as error:
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

    def _end(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, deque()
            readers = dict(self._readers)
        self._give_ids(arrived)
        self._write(readers, math.inf)
        if self._file is not None:
            self._file.close()
