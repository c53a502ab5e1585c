"""EventLog: events get their ids here, survive restarts, and are read in order by every reader."""

from __future__ import annotations

import logging
import math
import secrets
import sqlite3
import threading
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_server.pipeline.event_file import GIVEN, EventFile
from edge_server.process.utf8 import as_utf8
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.pipeline.events import Event

log = logging.getLogger(__name__)

# About 350 bytes each on disk and 900 in memory: those of a minute without a broker, and of the
# longest delay of its publisher's back-off, at 50 a second, twice.
KEPT = 10_000
# The reason of a model that cannot serve may be as long as its library pleases.
_LONGEST_TEXT = 2000
_STEP_S = 0.2
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
