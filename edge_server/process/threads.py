"""Threads: a `Worker` for work that repeats, a `ThreadPool` for requests, and functions for work
that ends.

Where the system refuses a thread, `run_parallel` and `side_by_side` use those that they got, or the
caller's; `start_thread` returns False and `start_future` None; `run_with_timeout` raises."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelLoadError,
    StageStuck,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


# Of the monitor's late looks. A monitor that looks twice a second and is late each time has those
# of the last eight minutes at least.
_MOST_REMEMBERED = 1000


class AwakeTime:
    """The age of what one monitor watches, without the time in which the monitor did not run.

    A process that was stopped, suspended or starved runs all its threads again at once, and the
    monitor may be the first of them. By the clock alone everything would then seem to hang.

    For the monitor's thread alone.

    Args:
        longest_s: the time between two looks that counts at most; of a longer one the rest was
            sleep. It is more than the monitor's period, and less than its limits.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._first = self._last = inf
        # When a sleep had ended, and how long it was.
        self._sleeps: deque[tuple[float, float]] = deque(maxlen=_MOST_REMEMBERED)

    def look(self, now: float) -> None:
        """Note that the monitor looks at `now` (`time.monotonic()`); called before `since`."""
        slept_s = now - self._last - self._longest_s
        if slept_s > 0:
            self._sleeps.append((now, slept_s))
        self._first, self._last = min(self._first, now), now

    def since(self, moment: float) -> float:
        """Return for how many seconds before the last look the monitor was awake after `moment`.

        What began before the first look counts from the first look.
        """
        slept_s = 0.0
        for ended, each_s in reversed(self._sleeps):
            if ended <= moment:
                break
            slept_s += each_s
        return max(0.0, self._last - max(moment, self._first) - slept_s)


def processor_waits_s() -> dict[int, float]:
    """Return for how long each thread of this process, by its id, could have run and had no
    processor, in s since its start; nothing where the kernel does not count it."""
    waits_s = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):
            _, waited_ns, _ = (task / "schedstat").read_text().split()
            waits_s[int(task.name)] = int(waited_ns) / 1e9
    return waits_s


class Backoff:
    """Doubling delays with jitter, so that the devices of a fleet do not reconnect all at once.

    The n-th delay lies between half and the whole of `first_s * 2**n`, at most `longest_s`; `draw`
    says where, in 0..1.
    """

    def __init__(
        self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random
    ) -> None:
        self.longest_s = longest_s
        self._first_s = first_s
        self._draw = draw
        self._whole_s = first_s

    def next_s(self) -> float:
        whole_s = self._whole_s
        self._whole_s = min(self.longest_s, whole_s * 2)
        return whole_s * (0.5 + self._draw() / 2)

    def reset(self) -> None:
        """Restart from the first delay, after an attempt has succeeded."""
        self._whole_s = self._first_s


# How long a part that can be opened again stays closed; the reason is to be seen before.
_CLOSED_S, _LONGEST_CLOSED_S = 2.0, 60.0
# Threads of one such part that hang: none can be ended, so more would only add up.
_MOST_HANGING = 2


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

    Attributes:
        heartbeat: `time.monotonic()` of the last progress, and the limit for the next in s.
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
        # One tuple, as the supervisor reads it on another thread.
        self.heartbeat = (time.monotonic(), deadline_s)
        # A heartbeat that seems late, and how long each thread had waited for a processor by then.
        self._late: tuple[float, dict[int, float]] = (-inf, {})
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.beat()
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
        """Allow `limit_s` for a part of a tick; see `beat`."""
        self.beat(limit_s)
        try:
            yield
        finally:
            self.beat()

    @property
    def limit_s(self) -> float:
        return self.heartbeat[1]

    def stuck(self, now: float) -> bool:
        at, limit_s = self.heartbeat
        return self.alive and now - at > limit_s

    def hangs(
        self, awake: AwakeTime, waits_s: Callable[[], dict[int, float]] = processor_waits_s
    ) -> bool:
        """Return whether the thread has passed its deadline; for the monitor, which has just looked
        with `awake`.

        From half of the deadline on, the time does not count in which a thread of the process had
        no processor: on an overloaded machine this thread is starved, or waits for one that is, and
        does not hang.
        """
        at, limit_s = self.heartbeat
        age_s = awake.since(at)
        if age_s <= limit_s / 2 or not self.alive:
            return False
        now_s = waits_s()
        if self._late[0] != at:
            self._late = (at, now_s)
        before_s = self._late[1]
        starved_s = max(
            (now_s[each] - before_s[each] for each in now_s.keys() & before_s), default=0.0
        )
        return age_s - starved_s > limit_s

    def beat(self, limit_s: float | None = None) -> None:
        """Count as progress, on this worker's thread; what follows may take `limit_s`."""
        self.heartbeat = (time.monotonic(), self.deadline_s if limit_s is None else limit_s)

    def _run(self) -> None:
        self._keep_failure(self._tick_until_stopped)
        if self._on_end is not None:
            self._keep_failure(self._on_end)

    def _tick_until_stopped(self) -> None:
        while not self._stop.is_set():
            if self._tick(time.monotonic()) is False:
                break
            self.beat()

    def _keep_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            log.exception("worker %s: ended by an error", self.name)


def check_progress(workers: Sequence[Worker], awake: AwakeTime) -> None:
    """Raise where a worker hangs or has died.

    Only the main loop calls it, which has just looked with `awake`, so that no timer thread can
    feed the watchdog while a stage is stuck.

    Raises:
        StageStuck: a worker's tick has passed its deadline, or raised this.
        InternalError: a worker ended by an exception.
    """
    for worker in workers:
        if isinstance(worker.failure, StageStuck):
            raise worker.failure
        if worker.failure is not None:
            raise InternalError(f"worker {worker.name}: {worker.failure!r}")
        if worker.hangs(awake):
            raise StageStuck(
                f"worker {worker.name}: no progress for more than {worker.limit_s:g} s"
            )


class Auxiliary:
    """A part that the process can do without: where a thread of it hangs or dies, it is closed and
    opened again, after a pause that doubles while that happens again.

    Args:
        name: for the log.
        workers: returns its present threads.
        reopen: gives them up, without waiting, and starts others; may raise OSError or
            RuntimeError, and is then called again.

    Attributes:
        fault: why it is closed; "" while it works.
    """

    def __init__(
        self, name: str, workers: Callable[[], Sequence[Worker]], reopen: Callable[[], None]
    ) -> None:
        self.fault = ""
        self._name = name
        self._workers = workers
        self._reopen = reopen
        self._hanging: list[Worker] = []
        self._pause = Backoff(_CLOSED_S, _LONGEST_CLOSED_S)
        self._due_s = 0.0

    def check(self, now: float, awake: AwakeTime) -> None:
        """Close the part where it makes no progress, and open it again when that is due; for the
        main loop, which has just looked, at `now`."""
        self._hanging = [worker for worker in self._hanging if worker.alive]
        if self.fault:
            if now >= self._due_s and len(self._hanging) < _MOST_HANGING:
                self._try_to_open(now)
            return
        try:
            check_progress(self._workers(), awake)
        except EdgeServerError as error:
            self.fault = str(error)
            self._hanging += [worker for worker in self._workers() if worker.stuck(now)]
            self._wait(now)
            # Its text says it all; of one that died, the worker has logged the traceback.
            log.error("%s: closed, and opened again: %s", self._name, error)  # noqa: TRY400
        else:
            if now - self._due_s > _LONGEST_CLOSED_S:
                self._pause.reset()

    def _try_to_open(self, now: float) -> None:
        try:
            self._reopen()
        except (OSError, RuntimeError) as error:
            self._wait(now)
            log.warning("%s: cannot be opened again yet: %s", self._name, error)
        else:
            self.fault = ""
            log.warning("%s: open again", self._name)

    def _wait(self, now: float) -> None:
        self._due_s = now + self._pause.next_s()


log = logging.getLogger(__name__)


class Runs(Protocol):
    def run(self) -> None: ...


T = TypeVar("T")
R = TypeVar("R")
Task = TypeVar("Task", bound=Runs)

# How often a long wait calls `require_wanted`.
LOOK_S = 0.1
_WHY_UNWANTED: ContextVar[Callable[[], str]] = ContextVar("why_unwanted", default=str)


class GivenUp(Unavailable):
    """The work was ended because its result is not wanted any more; the text says why."""


@contextmanager
def while_wanted(why_unwanted: Callable[[], str]) -> Iterator[None]:
    """Let the long waits of this thread inside the block end with `GivenUp`, once `why_unwanted`
    returns a reason."""
    before = _WHY_UNWANTED.set(why_unwanted)
    try:
        yield
    finally:
        _WHY_UNWANTED.reset(before)


def require_wanted() -> None:
    """Raises: GivenUp: the result of this thread's work is not wanted; see `while_wanted`."""
    if why := _WHY_UNWANTED.get()():
        raise GivenUp(why)


def start_thread(name: str, work: Callable[[], object]) -> bool:
    """Start `work` on a new daemon thread; return False if the system refuses a thread."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def start_future(name: str, work: Callable[[], R]) -> Future[R] | None:
    """Start `work` on a new daemon thread; None if the system refuses a thread. What this thread
    waits `while_wanted`, the new one does."""
    future: Future[R] = Future()
    context = copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)

    return future if start_thread(name, run) else None


def run_parallel(
    name: str,
    limit: int,
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    all_or_none: bool = False,
) -> list[R]:
    """Return `function(item)` for each item, in order, with up to `limit` calls at a time.

    The caller's thread waits; it does the work itself where there is one item, a limit of 1, or no
    other thread. After an exception the other items are still done, or, with `all_or_none`, not
    wanted any more (see `while_wanted`); then the first exception is raised.
    """
    before = _WHY_UNWANTED.get()

    def why_unwanted() -> str:
        failed = all_or_none and errors
        return before() or (f"another of them failed: {errors[0]}" if failed else "")

    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        with suppress(IndexError), while_wanted(why_unwanted):
            while True:
                index, item = todo.popleft()
                try:
                    if all_or_none:
                        require_wanted()
                    results[index] = function(item)
                # The caller raises it.
                except BaseException as error:  # noqa: BLE001
                    errors.append(error)

    count = min(limit, len(todo))
    count = count if count > 1 else 0
    started = [future for _ in range(count) if (future := start_future(name, work))]
    if not started:
        work()
    wait(started)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def side_by_side(works: Sequence[Callable[[], None]], name: str) -> None:
    """Run all functions, each on its own thread; return when all are done.

    An exception in one function is logged, and does not stop the others.
    """

    def do(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s: failed", name)

    run_parallel(name, len(works), do, works)


class ThreadPool(Generic[Task]):
    """Runs tasks on up to `most` threads, which it starts on demand.

    Between tasks a thread waits on its own queue, and the thread that became idle last runs next:
    its caches are still warm, whereas the common queue of a ThreadPoolExecutor wakes the thread
    that has been idle longest.

    Attributes:
        waiting: the tasks without a thread; changed under `lock`.
    """

    def __init__(self, most: int, name: str) -> None:
        self.waiting: deque[Task] = deque()
        self.lock = threading.Lock()
        self._most = most
        self._name = name
        self._threads: list[threading.Thread] = []
        self._idle: list[SimpleQueue[Task | None]] = []
        self._closed = False

    def try_run(self, task: Task) -> bool:
        """Run `task` on an idle thread or on a new one; False where there is neither."""
        with self.lock:
            return self._offer(task)

    def close(self, timeout_s: float = 1.0) -> None:
        """Accept no more tasks, and wait `timeout_s` at most; the threads end after those that
        were accepted, which may hang."""
        with self.lock:
            self._closed = True
            for tasks in self._idle:
                tasks.put(None)
            self._idle.clear()
        until = time.monotonic() + timeout_s
        for thread in self._threads if timeout_s else ():
            thread.join(max(0.0, until - time.monotonic()))

    def _offer(self, task: Task) -> bool:
        if self._closed:
            return False
        if self._idle:
            self._idle.pop().put(task)
            return True
        if len(self._threads) == self._most:
            return False
        tasks: SimpleQueue[Task | None] = SimpleQueue()
        tasks.put(task)
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(tasks,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.append(thread)
        return True

    def _work(self, tasks: SimpleQueue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            try:
                task.run()
            except Exception:
                log.exception("%s: a task raised", self._name)
            # An idle thread must not keep a request's tensors alive.
            task = None
            with self.lock:
                if self.waiting:
                    tasks.put(self.waiting.popleft())
                elif self._closed:
                    return
                else:
                    self._idle.append(tasks)


class Hangs(ModelLoadError):
    """The work made no progress for too long; the resources that it holds are still in use."""


def run_with_timeout(
    name: str,
    work: Callable[[Callable[[], None]], T],
    timeout_s: float,
    *,
    late: Callable[[], None],
) -> T:
    """Run `work` on a new thread; return its result or raise its exception.

    Args:
        work: receives a function to call at each sign of progress, which raises `GivenUp` once
            this call has ended.
        timeout_s: the longest time between two signs of progress, in seconds.
        late: called on that thread if the work ends after the timeout.

    Raises:
        Hangs: the work made no progress in time. It keeps running with all that it holds.
        GivenUp: see `require_wanted`; likewise.
        ModelLoadError: the system refuses a thread.
    """
    progress_s = time.monotonic()
    outcome: Future[T] = Future()

    def note_progress() -> None:
        nonlocal progress_s
        if outcome.cancelled():
            raise GivenUp(f"{name}: nothing waits for it any more")
        progress_s = time.monotonic()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(outcome.set_result, work(note_progress))
        # The waiting caller raises it, even a SystemExit of a model.
        except BaseException as error:  # noqa: BLE001
            settle = partial(outcome.set_exception, error)
        # False where the caller has given up.
        if outcome.set_running_or_notify_cancel():
            settle()
            return
        try:
            late()
        except Exception:
            log.exception("%s: ended after its timeout, and closing its model failed", name)

    if not start_thread(name, run):
        raise ModelLoadError("the system has no thread left for it")
    while (left_s := progress_s + timeout_s - time.monotonic()) > 0 or not outcome.cancel():
        if wait([outcome], min(LOOK_S, max(0.0, left_s))).done:
            return outcome.result()
        try:
            require_wanted()
        except GivenUp:
            if outcome.cancel():
                raise
    raise Hangs(f"it hangs: no progress for {timeout_s:g} s")
