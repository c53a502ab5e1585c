"""The model process's end of the link: messages, shared memory, and pending calls."""

from __future__ import annotations

import itertools
import queue
import threading
from typing import TYPE_CHECKING

from edge_server.backends.python.channel import ChannelClosed
from edge_server.backends.python.messages import (
    CallAnswered,
    CallReturned,
    Cancel,
    Execute,
    Taken,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.python.arena import ArenaReader, ArenaWriter
    from edge_server.backends.python.channel import Channel
    from edge_server.backends.python.messages import FromDaemon, Message


class ResponseWindow:
    """Limits the undelivered responses to one request."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._over = False
        self._changed = threading.Condition()

    def take(self) -> None:
        """Take a slot; wait for a free one unless the request has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._places > 0 or self._over)
            self._places -= 1

    def give_back(self, count: int) -> None:
        with self._changed:
            self._places += count
            self._changed.notify_all()

    def end(self) -> None:
        """Wake all waiting threads; later calls of `take` never wait."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class DaemonLink:
    """Sends messages to the daemon from any thread, and receives on its own thread.

    Args:
        channel: to the daemon.
        outbox: arena of this process's tensors.
        inbox: arena of the daemon's tensors.
        on_end: called when the daemon is gone, on the receiving thread.
    """

    def __init__(
        self,
        channel: Channel[FromDaemon],
        outbox: ArenaWriter,
        inbox: ArenaReader,
        on_end: Callable[[], None],
    ) -> None:
        self.outbox = outbox
        self.inbox = inbox
        # Messages that the main thread processes in order.
        self.work: queue.SimpleQueue[FromDaemon] = queue.SimpleQueue()
        # Other models may be called in `execute`, and until a request has its last response.
        self.executing = False
        # True from `initialize` to `finalize`.
        self.may_load = False
        self.unanswered: set[int] = set()
        self.cancelled: set[int] = set()
        # By request of a decoupled model.
        self.rooms: dict[int, ResponseWindow] = {}
        self._channel = channel
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._calls: dict[int, Callable[[CallAnswered | CallReturned], None]] = {}
        self._thread = threading.Thread(target=self._listen, name="daemon-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the daemon is gone.
        """
        # A daemon that does not read for a while is busy; a daemon that is gone closes the socket.
        self._channel.send(message, patience_s=60.0)

    def call(
        self, message: Callable[[int], Message], hear: Callable[[CallAnswered | CallReturned], None]
    ) -> int:
        """Send `message(number)`; `hear` is called with each reply, on the link's thread."""
        number = next(self._numbers)
        self._calls[number] = hear
        try:
            self.send(message(number))
        except BaseException:
            self._calls.pop(number, None)
            raise
        return number

    def ask(self, message: Callable[[int], Message]) -> CallReturned:
        """Send `message(number)` and wait for the returned value."""
        returned: queue.SimpleQueue[CallReturned] = queue.SimpleQueue()
        self.call(message, returned.put)  # type: ignore[arg-type]
        return returned.get()

    def answered(self, number: int) -> None:
        """Forget a request that has its last response."""
        self.unanswered.discard(number)
        self.cancelled.discard(number)
        if (room := self.rooms.pop(number, None)) is not None:
            # Wake threads that still wait for a slot.
            room.end()

    def _listen(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self.take(message)
        except ChannelClosed:
            pass
        finally:
            self._on_end()

    def take(self, message: FromDaemon) -> None:
        """Process one message of the daemon."""
        if isinstance(message, Cancel):
            if message.number in self.unanswered:
                self.cancelled.add(message.number)
        elif isinstance(message, Taken):
            if (room := self.rooms.get(message.number)) is not None:
                room.give_back(message.count)
        elif isinstance(message, CallAnswered):
            ended = message.final
            hear = self._calls.pop(message.call, None) if ended else self._calls.get(message.call)
            if hear is not None:
                hear(message)
        elif isinstance(message, CallReturned):
            if (hear := self._calls.pop(message.call, None)) is not None:
                hear(message)
        else:
            if isinstance(message, Execute):
                self.unanswered.update(asked.number for asked in message.requests)
            self.work.put(message)


class _Here:
    """Holds the process's only link: the functions of `pb_utils` take none as an argument."""

    link: DaemonLink | None = None
    model_directory = ""


here = _Here()


def daemon() -> DaemonLink:
    """Return the process's link.

    Raises:
        RuntimeError: outside a model's process.
    """
    if here.link is None:
        raise RuntimeError("this works only in the process that edge_server runs a model in")
    return here.link
