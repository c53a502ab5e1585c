"""EventLog: events get their ids here, survive restarts, and are read in order by every reader."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import math
import os
import secrets
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from edge_server.errors import Unavailable
from edge_server.process.disk import error_of_place, lock_file, sync
from edge_server.process.text import as_utf8
from edge_server.process.threads import Worker
from edge_server.settings.sections import EventKind  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

EventPhase = Literal["begin", "end", "instant"]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


@dataclass(frozen=True)
class Event:
    """One event, as `edge/lanes/v1/events.proto` describes it.

    Attributes:
        id: counts the events of `log`, across restarts too; 0 before the event log has given it.
        begin_id: the id of the event that began what this one ends.
        cause: a word.
        distance_to_line_m: of a departure; negative beyond the line.
        log: the identity of the event log, which gives it with the id.
    """

    kind: EventKind
    phase: EventPhase
    cause: str
    text: str
    mono_ns: int
    epoch_ns: int
    id: _Id = 0
    begin_id: int = 0
    camera: str = ""
    frame_id: int | None = None
    model: str = ""
    model_version: str = ""
    distance_to_line_m: float | None = None
    time_to_line_s: float | None = None
    log: str = ""


log = logging.getLogger(__name__)

# The greatest id that was given or seen, beside the ids of readers.
GIVEN = "ids given"
# No file has more events: what of a damaged one cannot be read has no greater distance in ids.
_MOST_EVENTS = 100_000
_BLOCK_BYTES = 4096
_encode = msgspec.json.Encoder().encode


class _Other(msgspec.Struct):
    """An event that another version of this program wrote, in a form that this one does not
    know."""

    id: _Id


_DECODERS: tuple[msgspec.json.Decoder[Any], ...] = (
    msgspec.json.Decoder(Event),
    msgspec.json.Decoder(_Other),
    msgspec.json.Decoder(dict[str, _Id]),
)


def _parsed(line: bytes) -> Event | _Other | dict[str, int] | None:
    """Return an event, or ids of readers by their names; None where the line is damaged."""
    for decoder in _DECODERS:
        with contextlib.suppress(ValueError, RecursionError):
            found: Event | _Other | dict[str, int] = decoder.decode(line)
            return found
    return None


class EventFile:
    """The file of an event log, lines of JSON; for one thread at a time.

    A line is written behind the others; of a torn or damaged one the others stay readable. A file
    that is damaged is set aside, in place of an earlier one, and its readable events go on in a new
    one. Where the disk is full or read-only, new events are in memory until it is not.

    Attributes:
        events: that the file held at the start, in the order of their ids.
        last_id: no event of the file has a greater id.
        readers: the id up to which each reader has every event, as last written; see `GIVEN`.

    Args:
        path: its directory is the daemon's own.
        kept: number of events to keep; the file is written again when it has twice as many lines.

    Raises:
        SettingsError, Unavailable: the file cannot be made, or another daemon has it.
    """

    def __init__(self, path: Path, kept: int) -> None:
        self._path = path
        self._kept = kept
        self._descriptor = -1
        self._size = 0
        self._lines = 0
        self._damaged = False
        self.events: list[Event] = []
        self.last_id = 0
        self.readers: dict[str, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = lock_file(path, 0o644)
            sync(path.parent)
        except BlockingIOError as error:
            raise Unavailable(
                f"{path}: another daemon keeps its events there; give this one another events.file"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EROFS):
                log.error("events: %s: %s; they are kept in memory", path, error.strerror)  # noqa: TRY400 -- the text says it all
                return
            raise error_of_place(
                error, f"{path}: events cannot be kept there: {error.strerror}"
            ) from error
        *lines, rest = _readable(self._descriptor).split(b"\n")
        self._damaged = bool(rest)
        for line in lines:
            self._take_in(_parsed(line))
        # A damaged id may be higher than those behind it.
        by_id = {event.id: event for event in self.events}
        self.events = [by_id[each] for each in sorted(by_id)]
        self._size, self._lines = os.fstat(self._descriptor).st_size, len(lines)
        self.last_id = max(self.last_id, self.readers.get(GIVEN, 0))
        self.readers = {name: min(each, self.last_id) for name, each in self.readers.items()}
        if self._damaged:
            self._set_aside()

    def _take_in(self, found: Event | _Other | dict[str, int] | None) -> None:
        if isinstance(found, dict):
            self.readers.update(found)
        elif found is None:
            self._damaged = True
        else:
            self._damaged |= found.id <= self.last_id
            self.last_id = max(self.last_id, found.id)
            if isinstance(found, Event):
                self.events.append(found)

    def _set_aside(self) -> None:
        # Where none is readable: no device has had so many events as the clock has seconds.
        self.last_id = (self.last_id or int(time.time())) + _MOST_EVENTS
        self.readers[GIVEN] = self.last_id
        aside = self._path.with_name(f"{self._path.name}.damaged-{int(time.time())}")
        log.error(
            "events: %s is damaged; it is now %s, and %d events of it go on",
            *(self._path, aside.name, len(self.events)),
        )
        with contextlib.suppress(OSError):
            # A disk that damages file after file would be full of them.
            for older in self._path.parent.glob(f"{glob.escape(self._path.name)}.damaged-*"):
                older.unlink()
            aside.hardlink_to(self._path)
        with contextlib.suppress(OSError):  # until the disk has room, they are in memory
            self._write_anew(self.events, self.readers)

    def store(
        self, new: Iterable[Event], readers: dict[str, int], every: Callable[[], Iterable[Event]]
    ) -> None:
        """Write events and readers, and return when they are durable.

        Args:
            every: returns the newest events, `new` among them, for a file that is rewritten: one
                that is full, damaged, removed or replaced.

        Raises:
            OSError: they are not written.
        """
        is_mine = self._descriptor >= 0 and self._is_there()
        if not is_mine or self._lines >= 2 * self._kept or self._damaged:
            self._write_anew(every(), readers)
            return
        lines = list(map(_encode, new))
        if readers != self.readers:
            lines.append(_encode(readers))
        self._size = _append(self._descriptor, lines, self._size)
        self._lines += len(lines)
        self.readers = readers

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _is_there(self) -> bool:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self._path.stat()):
                return True
        log.error("events: %s was removed or replaced; it is written again", self._path)
        self.close()
        return False

    def _write_anew(self, events: Iterable[Event], readers: dict[str, int]) -> None:
        lines = [*map(_encode, events), _encode(readers)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        descriptor = lock_file(new, 0o644)
        try:
            size = _append(descriptor, lines, 0)
            new.replace(self._path)
            sync(self._path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self._size, self._lines = descriptor, size, len(lines)
        self.readers, self._damaged = readers, False


def _append(descriptor: int, lines: Iterable[bytes], start: int) -> int:
    """Write `lines` from `start` on, durably; return where they end.

    Raises:
        OSError: nothing is written.
    """
    at, rest = start, memoryview(b"".join(line + b"\n" for line in lines))
    try:
        while rest:
            written = os.pwrite(descriptor, rest, at)
            at, rest = at + written, rest[written:]
        os.fdatasync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, start)
        raise
    return at


def _readable(descriptor: int) -> bytes:
    """Return what the disk gives of a file, with zeros for the rest."""
    blocks = []
    for start in range(0, os.fstat(descriptor).st_size, _BLOCK_BYTES):
        try:
            blocks.append(os.pread(descriptor, _BLOCK_BYTES, start))
        except OSError:
            blocks.append(bytes(_BLOCK_BYTES))
    return b"".join(blocks)


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
        self._callbacks: tuple[Callable[[], object], ...] = ()  # replaced, never changed
        self._retry_at = 0.0
        self._failure = ""
        self._last_id = 0
        self._file = None if path is None else EventFile(path, kept)
        if self._file is not None:
            self._events.extend(self._file.events)
            self._file.events.clear()
            self._last_id = self._file.last_id
            self._readers = dict(self._file.readers)
        self.earlier = self._last_id
        logs = (event.log for event in reversed(self._events) if event.log)
        self.id = next(logs, "") or secrets.token_hex(8)

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
        """Wait until there is an event with a greater id; return whether there is."""

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
            self._changed.notify_all()

    def acknowledged(self, reader: str) -> int:
        """Return the id up to which `reader` has every event; 0 for a new reader."""
        with self._changed:
            return self._readers.get(reader, 0)

    def continue_above(self, id_: int) -> None:
        """Give greater ids than `id_`, which a reader has had, to all events to come."""
        with self._changed:
            self._last_id = max(self._last_id, id_)
            self._readers[GIVEN] = self._last_id
            self._changed.notify_all()

    # The methods below run on the worker, or before it starts.

    def _tick(self, now: float) -> None:
        with self._changed, self.worker.allowing(math.inf):
            # A disk that failed, and more ids of readers, can wait; nothing else comes by itself.
            waits = bool(self._unwritten) or self._has_reader_news()

            def is_due() -> bool:
                news = not waits and self._has_reader_news()
                return bool(self._arrived) or news or self.worker.stopping

            self._changed.wait_for(is_due, _STEP_S if waits else None)
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

    def _has_reader_news(self) -> bool:
        return self._file is not None and self._readers != self._file.readers

    def _write(self, readers: dict[str, int], now: float) -> None:
        """Write what is not written, and make it visible in any case."""
        visible = self.newest
        new = [event for event in self._unwritten if event.id > visible]
        has_news = bool(self._unwritten) or self._has_reader_news()
        if self._file is not None and has_news and (new or now >= self._retry_at):
            try:
                self._file.store(self._unwritten, readers, self._every)
            except OSError as error:
                self._retry_at = now + _RETRY_S
                self._note(f"cannot be written: {error.strerror or error}; they are kept in memory")
            else:
                self._unwritten.clear()
                self._note("")
        elif self._file is None:
            self._unwritten.clear()
        if new:
            with self._changed:
                self._events.extend(new)
                self._changed.notify_all()
            for callback in self._callbacks:
                callback()

    def _every(self) -> Iterable[Event]:
        """Return the newest events, those that are not visible yet too."""
        every = {event.id: event for event in (*self._events, *self._unwritten)}
        return list(every.values())[-self._kept :]

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


class LastingEvents:
    """Puts an event where something begins and one where it ends, which names the first; for one
    thread."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._lasting: dict[tuple[EventKind, str], tuple[str, Ticket]] = {}

    def names(self, kind: EventKind) -> dict[str, str]:
        """Return what lasts of that kind, by name, each with its cause."""
        return {name: cause for (each, name), (cause, _) in self._lasting.items() if each == kind}

    def begin(self, name: str, event: Event) -> None:
        """Put the event that begins `name` of its kind."""
        self._lasting[event.kind, name] = event.cause, self._log.put(replace(event, phase="begin"))

    def end(self, name: str, event: Event) -> None:
        """Put the event that ends `name` of its kind, where that lasts."""
        _, ticket = self._lasting.pop((event.kind, name), ("", None))
        if ticket is not None:
            self._log.put(replace(event, phase="end"), ticket)

    def put(self, event: Event) -> None:
        """Put an event without an end."""
        self._log.put(event)
