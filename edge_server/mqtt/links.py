"""Links: the link to the broker, and the one that takes its place when the broker changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.mqtt import payloads
from edge_server.mqtt.link import Link, contents_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.mqtt.feed import Feed
    from edge_server.process.worker import Worker
    from edge_server.settings import Mqtt


class Links:
    """Publishes a feed to one broker at a time. Safe from any thread.

    Attributes:
        link: to the broker that has the lanes; None where nothing is published.

    Args:
        mqtt: the broker; None publishes nothing until `change`.
        feed: is published.
        begins: called with a later broker of `change` before it gets anything.
    """

    def __init__(
        self, mqtt: Mqtt | None, feed: Feed, begins: Callable[[Mqtt | None], None]
    ) -> None:
        self._feed = feed
        self._begins = begins
        self._lock = threading.Lock()
        self.link = None if mqtt is None else Link(mqtt, feed, self._take_over)
        self._next: Link | None = None
        self._stopped = False

    @property
    def state(self) -> str:
        """The connection to the broker, for people."""
        link, following = self.link, self._next
        if link is None:
            return "off"
        state = "connected" if link.connected else f"away ({link.trouble or 'connecting'})"
        if link.connected and (contest := self._feed.contest.text):
            state += f" ({contest})"
        if following is not None:
            state += f", not yet at {following.address} ({following.trouble or 'connecting'})"
        return state

    def workers(self) -> list[Worker]:
        """Return the threads whose hang, or end by an error, must end the daemon."""
        with self._lock:
            return [link.worker for link in (self.link, self._next) if link is not None]

    def start(self) -> None:
        """Start connecting to the broker; returns at once. `status` is `starting`."""
        if self.link is not None:
            self.link.worker.start()

    def stop(self) -> None:
        """Publish `offline` if a broker is connected, and stop; takes 1 s at most."""
        with self._lock:
            self._stopped = True
            link, following = self.link, self._next
        self._feed.outbox.put_state(self._feed.topics.status, self._offline())
        _abandon(following)
        if link is not None:
            link.leave()
            if link.worker.alive:
                link.wait_until_left()
                link.worker.stop(timeout_s=0.1)  # a worker deep in a connect ends with the process

    def ring(self) -> None:
        """Have the present link look into the outbox."""
        if (link := self.link) is not None:
            link.ring()

    def change(self, mqtt: Mqtt | None) -> str:
        """Publish to the broker of `mqtt` from the moment on when it accepts this device.

        Until then the broker so far keeps the lanes; then it gets `offline`, and the new one every
        state. A file whose contents have changed is a change like any other. Returns at once.

        Args:
            mqtt: the broker; None publishes nothing more.

        Returns:
            What is going to happen, in words; empty if nothing changes.
        """
        # Outside of the lock, for which the supervisor waits: a disk may hang.
        contents = () if mqtt is None else contents_of(mqtt)
        with self._lock:
            link, following = self.link, self._next
            if self._stopped or (link is None and mqtt is None):
                return ""
            if link is None or mqtt is None:
                self._begins(mqtt)
                return self._switch(mqtt, contents)
            if link.is_of(mqtt, contents):
                self._next = None
                _abandon(following)
                return "" if following is None else f"stays at {link.address}"
            if following is None or not following.is_of(mqtt, contents):
                self._next = Link(mqtt, self._feed, self._take_over, link.address, contents)
                _abandon(following)
                self._next.worker.start()
                if self._next.address == link.address:
                    return f"logs in to {link.address} anew"
                return f"moves from {link.address} to {self._next.address} once accepted there"
            return ""

    def _switch(self, mqtt: Mqtt | None, contents: tuple[str, ...]) -> str:
        """Begin or end to publish at all."""
        link, following = self.link, self._next
        self._next = None
        if mqtt is not None:
            self.link = Link(mqtt, self._feed, self._take_over, contents=contents)
            self.link.worker.start()
            return f"on, at {self.link.address}"
        self.link = None
        _abandon(following)
        if link is None:
            return ""
        link.leave(self._offline())
        return f"off, {link.address} is left"

    def _take_over(self, link: Link) -> bool:
        """Return whether `link` publishes from now on, after the one before; called on its
        worker."""
        with self._lock:
            if link is not self._next or self.link is None:
                return link is self.link
            before, self.link, self._next = self.link, link, None
        before.leave(self._offline())
        if before.connected:
            before.wait_until_left()
        self._feed.contest.log_in_anew()
        self._begins(link.mqtt)
        return True

    def _offline(self) -> bytes:
        return payloads.status(self._feed.identity, "offline")


def _abandon(link: Link | None) -> None:
    if link is not None:
        link.abandon()
