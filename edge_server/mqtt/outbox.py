"""What waits to be published, bounded whatever the broker does. Knows no broker."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Live = TypeVar("Live")


class Outbox(Generic[Live]):
    """Two kinds of mail, both bounded by the number of topics.

    Live samples: the newest of each topic waits, the one it replaces counts as dropped; whatever
    waited longest goes first, so a busy camera does not starve another. Retained state: the
    latest of each topic is kept until it is emptied, sent when it changes and again on every new
    connection, always before live samples.

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
        """Live samples that were replaced before they could go."""
        return self._dropped

    @property
    def waiting(self) -> int:
        """Messages that could go now; never more than there are topics."""
        with self._lock:
            return len(self._live) + len(self._due)

    def put_live(self, topic: str, sample: Live) -> bool:
        """Keep `sample` as the newest of its topic; True if none was waiting there before."""
        with self._lock:
            fresh = topic not in self._live
            self._live[topic] = sample
            if not fresh:
                self._dropped += 1
            return fresh

    def put_state(self, topic: str, payload: bytes) -> bool:
        """Keep `payload` as the state of its topic; False if that is what it said before.

        An empty one takes the topic away from the broker; once it is taken it is forgotten.
        """
        with self._lock:
            if self._state.get(topic) == payload:
                return False
            self._state[topic] = payload
            self._due[topic] = None
            return True

    def connected(self) -> None:
        """A broker that may know nothing is there: all state is due again."""
        with self._lock:
            self._due = dict.fromkeys(self._state)

    def take_state(self) -> tuple[str, bytes] | None:
        """The state that is due longest, or None."""
        with self._lock:
            for topic in self._due:
                del self._due[topic]
                payload = self._state[topic]
                if not payload:
                    # Where the connection breaks now, the broker tells of the topic on the next.
                    del self._state[topic]
                return topic, payload
            return None

    def knows(self, topic: str) -> bool:
        """Whether there is a state of that topic."""
        with self._lock:
            return topic in self._state

    def take_live(self) -> tuple[str, Live] | None:
        """The live sample of the topic that waits longest, or None."""
        with self._lock:
            for topic in self._live:
                return topic, self._live.pop(topic)
            return None
