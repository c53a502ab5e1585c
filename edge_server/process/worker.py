"""Threads of the daemon: named, stoppable, with a heartbeat that shows progress."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import InternalError, StageStuck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.process.awake_time import AwakeTime

log = logging.getLogger(__name__)


class Worker:
    """A named thread that calls `tick` until `stop` is called or `tick` returns False.

    The heartbeat moves each time a tick returns, so a tick that hangs shows as an old heartbeat. A
    tick that waits for an outside event (a frame, a broker) bounds its wait and returns: waiting
    counts as progress, hanging does not. A part of a tick whose end another component guarantees
    may have its own limit: see `allowing`. An exception ends the thread and is kept in `failure`,
    whether `tick` or `on_end` raised it.

    Args:
        name: of the thread, as shown in logs and by `ps -T`.
        tick: one short piece of work, called with `time.monotonic()`; False ends the thread.
        deadline_s: maximum duration of one tick before the worker counts as stuck.
        on_end: called on this thread when it ends, in every case.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[float], bool | None],
        *,
        deadline_s: float = 10.0,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self.failure: BaseException | None = None
        self._tick = tick
        self._on_end = on_end
        self._stop = threading.Event()
        # Time of the last progress, and the limit for the next. One tuple, as the supervisor reads
        # it on another thread.
        self._heartbeat = (time.monotonic(), deadline_s)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Stop the thread after its current tick; return at once."""
        self._stop.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and wait for it, unless the thread is stuck or never started."""
        self.ask_to_stop()
        waitable = self.alive and not self.stuck(time.monotonic())
        if waitable and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def wait(self, seconds: float) -> None:
        """Sleep on this worker's thread; a stop request ends the sleep early."""
        self._stop.wait(seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether the thread has been asked to stop: a wait of its tick may end early."""
        return self._stop.is_set()

    @contextmanager
    def allowing(self, limit_s: float) -> Iterator[None]:
        """Allow `limit_s` for a part of a tick, on this worker's thread; the begin and end of
        that part count as progress."""
        self._beat(limit_s)
        try:
            yield
        finally:
            self._beat()

    @property
    def limit_s(self) -> float:
        """The current limit for the next progress."""
        return self.heartbeat[1]

    @property
    def heartbeat(self) -> tuple[float, float]:
        """`time.monotonic()` of the last progress, and the limit for the next in s."""
        return self._heartbeat

    def stuck(self, now: float) -> bool:
        """Return whether a running tick has passed its deadline; `now` is `time.monotonic()`."""
        at, limit_s = self._heartbeat
        return self.alive and now - at > limit_s

    def _beat(self, limit_s: float | None = None) -> None:
        self._heartbeat = (time.monotonic(), self.deadline_s if limit_s is None else limit_s)

    def _run(self) -> None:
        self._keep_failure(self._tick_until_stopped)
        if self._on_end is not None:
            self._keep_failure(self._on_end)

    def _tick_until_stopped(self) -> None:
        while not self._stop.is_set():
            if self._tick(time.monotonic()) is False:
                break
            self._beat()

    def _keep_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            log.exception("worker %s: ended by an error", self.name)


def check_progress(workers: Sequence[Worker], awake: AwakeTime) -> None:
    """Raise where a worker hangs or has died.

    Only the main loop calls it, so that no timer thread can feed the watchdog while a stage is
    stuck.

    Args:
        workers: all workers whose end or hang must end the process, so that systemd restarts it.
        awake: of the main loop, which has just looked.

    Raises:
        StageStuck: a worker's tick has passed its deadline, or raised this.
        InternalError: a worker ended by an exception.
    """
    for worker in workers:
        if isinstance(worker.failure, StageStuck):
            raise worker.failure
        if worker.failure is not None:
            raise InternalError(f"worker {worker.name}: {worker.failure!r}")
        at, limit_s = worker.heartbeat
        if worker.alive and awake.since(at) > limit_s:
            raise StageStuck(f"worker {worker.name}: no progress for more than {limit_s:g} s")
