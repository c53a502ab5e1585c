"""Outbox and Wake: how every thread hands messages to the one that speaks to the broker."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Generic, TypeVar

Live = TypeVar("Live")


class Outbox(Generic[Live]):
    """Two queues, both bounded by the number of topics, whatever the broker does.

    Live samples: the newest of each topic waits, and a replaced sample counts as dropped; the topic
    that has waited longest is sent first, so that a busy camera does not starve another. Retained
    state: the latest of each topic is kept until it is cleared, sent when it changes and again on
    every new connection, always before live samples.

    Safe from any thread; no call waits longer than another call takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, Live] = {}
        self._state: dict[str, bytes] = {}
        self._due: dict[str, None] = {}  # an ordered set of topics of `_state`
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Number of live samples that were replaced before they were sent."""
        return self._dropped

    @property
    def waiting(self) -> int:
        """Number of messages due; never more than the number of topics."""
        with self._lock:
            return len(self._live) + len(self._due)

    def put_live(self, topic: str, sample: Live) -> bool:
        """Keep `sample` as the newest of its topic; return True if the topic had none."""
        with self._lock:
            fresh = topic not in self._live
            self._live[topic] = sample
            if not fresh:
                self._dropped += 1
            return fresh

    def holds_live(self, topic: str) -> bool:
        """Whether a sample of the topic waits, which another would replace."""
        with self._lock:
            return topic in self._live

    def put_state(self, topic: str, payload: bytes) -> bool:
        """Keep `payload` as the state of its topic; return False if the state is unchanged.

        An empty payload clears the topic on the broker; the topic is forgotten once it is sent.
        """
        with self._lock:
            if self._state.get(topic) == payload:
                return False
            self._state[topic] = payload
            self._due[topic] = None
            return True

    def repeat_state(self, topic: str) -> None:
        """Make the state of a topic due again, if it has one."""
        with self._lock:
            if topic in self._state:
                self._due[topic] = None

    def connected(self) -> None:
        """Make all state due again: a new connection's broker may have none of it."""
        with self._lock:
            self._due = dict.fromkeys(self._state)

    def take_state(self) -> tuple[str, bytes] | None:
        """Return the state that has been due longest, or None."""
        with self._lock:
            for topic in self._due:
                del self._due[topic]
                payload = self._state[topic]
                if not payload:
                    # If the connection breaks now, the next one finds the topic as a leftover.
                    del self._state[topic]
                return topic, payload
            return None

    def knows(self, topic: str) -> bool:
        """Whether the topic has a state."""
        with self._lock:
            return topic in self._state

    def take_live(self) -> tuple[str, Live] | None:
        """Return the live sample of the topic that has waited longest, or None."""
        with self._lock:
            for topic in self._live:
                return topic, self._live.pop(topic)
            return None


class Wake:
    """Lets another thread end a wait for sockets. Rings before a `clear` count as one."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, readable after a ring."""
        return self._reader.fileno()

    def ring(self) -> None:
        """End the wait; never blocks, and does nothing after `close`."""
        with contextlib.suppress(OSError):  # the socket is full: an earlier ring is pending
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def wait(self, seconds: float) -> None:
        """Return after a ring or after `seconds`, and clear the ring."""
        poll = select.poll()  # takes descriptors above 1023, too
        poll.register(self._reader, select.POLLIN)
        if poll.poll(max(0.0, seconds * 1e3)):
            self.clear()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
