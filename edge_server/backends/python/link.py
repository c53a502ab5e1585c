"""The model process's end of the link: messages, shared memory, and pending calls."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
from typing import TYPE_CHECKING

from edge_server.backends.python import messages as m
from edge_server.process.child import ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.python.shared_memory import ArenaReader, ArenaWriter
    from edge_server.process.child import Channel


class DaemonLink:
    """Sends messages to the daemon from any thread, and receives on its own thread. The process and
    its children end when the daemon's end of the channel closes."""

    def __init__(
        self, channel: Channel[m.FromDaemon], outbox: ArenaWriter, inbox: ArenaReader
    ) -> None:
        self.outbox = outbox
        self.inbox = inbox
        # Messages that the main thread processes in order.
        self.work: queue.SimpleQueue[m.FromDaemon] = queue.SimpleQueue()
        # Other models may be called in `execute`, and until a request has its last response.
        self.executing = False
        # True from `initialize` to `finalize`.
        self.may_load = False
        self.unfinished: set[int] = set()
        self.cancelled: set[int] = set()
        # Request of a decoupled model → how many more responses it may send now.
        self._windows: dict[int, int] = {}
        self._window_changed = threading.Condition()
        self.pid = os.getpid()
        self._channel = channel
        self._numbers = itertools.count(1)
        self._calls: dict[int, Callable[[m.Responded | m.QueryResult], None]] = {}
        self._thread = threading.Thread(target=self._listen, name="daemon-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.Message) -> None:
        self._channel.send(message)

    def call(
        self,
        message: Callable[[int], m.Message],
        received: Callable[[m.Responded | m.QueryResult], None],
    ) -> int:
        """Send `message(number)`; `received` is called with each reply, on the link's thread."""
        number = next(self._numbers)
        self._calls[number] = received
        try:
            self.send(message(number))
        except BaseException:
            self._calls.pop(number, None)
            raise
        return number

    def query(self, what: m.Question) -> m.QueryResult:
        result: queue.SimpleQueue[m.QueryResult] = queue.SimpleQueue()
        # The reply to a query is a QueryResult.
        self.call(lambda number: m.Query(number, what), result.put)  # type: ignore[arg-type]
        return result.get()

    def open_window(self, number: int) -> None:
        """Limit the undelivered responses to a request from now on."""
        self._windows[number] = m.MOST_UNDELIVERED

    def wait_for_window(self, number: int) -> None:
        """Wait until the request may send one more response; its last response ends the wait."""
        with self._window_changed:
            self._window_changed.wait_for(lambda: self._windows.get(number, 1) > 0)
            self._change_window(number, -1)

    def forget(self, number: int) -> None:
        self.unfinished.discard(number)
        self.cancelled.discard(number)
        with self._window_changed:
            self._windows.pop(number, None)
            self._window_changed.notify_all()

    def _change_window(self, number: int, by: int) -> None:
        with self._window_changed:
            if number in self._windows:
                self._windows[number] += by
                self._window_changed.notify_all()

    def _listen(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self.dispatch(message)
        except ChannelClosed:
            pass
        finally:
            os.killpg(0, signal.SIGKILL)

    def dispatch(self, message: m.FromDaemon) -> None:
        if isinstance(message, m.Cancel):
            if message.number in self.unfinished:
                self.cancelled.add(message.number)
        elif isinstance(message, m.Delivered):
            self._change_window(message.number, message.count)
        elif isinstance(message, (m.Responded, m.QueryResult)):
            over = isinstance(message, m.QueryResult) or message.final
            received = (self._calls.pop if over else self._calls.get)(message.number, None)
            if received is not None:
                received(message)
        else:
            if isinstance(message, m.Execute):
                self.unfinished.update(request.number for request in message.requests)
            self.work.put(message)


class _Here:
    """Holds the process's only link: the functions of `pb_utils` take none as an argument."""

    link: DaemonLink | None = None
    model_directory = ""


here = _Here()


def daemon() -> DaemonLink:
    if here.link is None:
        raise RuntimeError("this works only in the process that edge_server runs a model in")
    return here.link


def replying_daemon() -> DaemonLink:
    """Return the process's link, for what the daemon replies to; a process that the model has
    started inherits the link, and no reply reaches it."""
    link = daemon()
    if link.pid != os.getpid():
        raise RuntimeError(
            "other models, their loads and metrics can be used in the model's own process only, "
            "and not in one that it has started; use threads, or call them before"
        )
    return link
