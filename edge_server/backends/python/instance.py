"""An instance of a Python model: a process that is there, or comes back."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.backends.python.child_session import ChildSession, latest_deadline, unhealthy
from edge_server.backends.python.model_log import ModelLog
from edge_server.backends.python.process import ChildProcess
from edge_server.errors import DeadlineExceeded, EdgeServerError, ModelLoadError
from edge_server.process.backoff import Backoff
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import ExecuteRequest, Phases
    from edge_server.backends.python.instance_arbiter import InstanceArbiter
    from edge_server.backends.python.messages import Start
    from edge_server.backends.python.metrics import MetricBook
    from edge_server.backends.server_context import ServerContext
    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

# An execution may take this long even where its callers wait less: callers in a hurry must not
# cost the others a process that is merely slow.
LEAST_EXECUTION_S = 1.0
FINALIZE_S = 2.0
# A wait for a process that stands in, and the execution there, together: what takes a minute counts
# as a hang of the daemon's own.
LONGEST_TURN_S = 55.0


@dataclass(frozen=True)
class ChildLimits:
    """How long somebody's code may take, and how much shared memory each direction has."""

    execution_s: float
    initialize_s: float
    arena_bytes: int


class PythonInstance:
    """Runs requests in a process of its own, which is started again whenever it ends.

    While it is away another instance of its model stands in for it; where there is none, requests
    are refused at once. Make it, then `open` it.

    Args:
        name: of the instance.
        start: what its process is told first.
        config: of its model.
        version: its model's version.
        metrics: of its model.
        arbiter: of its model's instances.
        server_context: what its model may load.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        config: ModelConfig,
        version: str,
        *,
        limits: ChildLimits,
        metrics: MetricBook,
        arbiter: InstanceArbiter[PythonInstance],
        server_context: ServerContext,
    ) -> None:
        self._name = name
        self._start = start
        self._config = config
        self._version = version
        self._limits = limits
        self._metrics = metrics
        self._arbiter = arbiter
        self._server_context = server_context
        self._log = ModelLog(config.name)
        self._backoff = Backoff(first_s=0.1, longest_s=30.0)
        self._lock = threading.Lock()
        self._closed = False
        # The one that lives now, and the one that can execute; in that order.
        self._current: ChildSession | None = None
        self._session: ChildSession | None = None
        self._why_away = "it has not started yet"
        self._first_tried = threading.Event()
        # The kernel's ties between processes and the thread that starts them want one that stays.
        self._worker = Worker(name, self._live_once, deadline_s=math.inf)

    def open(self) -> None:
        """Start the process; returns when it can execute.

        Raises:
            ModelLoadError: its first start failed; the text says why. It is closed.
        """
        self._worker.start()
        self._first_tried.wait()
        if self._session is None:
            why = self._why_away
            self.close()
            raise ModelLoadError(
                f"{self._start.directory}/{self._start.filename}: instance '{self._name}' does not "
                f"start: {why}"
            )

    @property
    def up(self) -> bool:
        """Whether its process can execute now."""
        session = self._session
        return session is not None and not session.why_over

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        error: EdgeServerError | None = None
        taken: PythonInstance | None = None
        deadline = latest_deadline(requests)
        patient_until = time.monotonic() + LONGEST_TURN_S - self._limits.execution_s
        try:
            taken = self._arbiter.take(self, min(deadline, patient_until))
        except DeadlineExceeded as late:
            error = late if deadline <= patient_until else None
        if taken is not None:
            try:
                return taken.run(requests)
            finally:
                self._arbiter.give_back(taken)
        for request in requests:
            request.respond(error or unhealthy(self._name, self._why), True)
        return None

    def run(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        """Execute in this instance's own process; its turn has been taken."""
        session = self._session
        if session is not None:
            return session.execute(requests, self._limits.execution_s, LEAST_EXECUTION_S)
        for request in requests:
            request.respond(unhealthy(self._name, self._why), True)
        return None

    @property
    def _why(self) -> str:
        """Why it is away."""
        session = self._session
        return self._why_away if session is None else session.why_over

    def not_ready_reason(self) -> str:
        """Why it cannot execute now; empty where it can."""
        session = self._session
        why = self._why_away if session is None else session.not_ready_reason()
        return why and f"instance '{self._name}': {why}"

    def close(self) -> None:
        """Let the model finalize, for a bounded time, and end its process."""
        self._worker.ask_to_stop()
        with self._lock:
            self._closed = True
            current, session = self._current, self._session
        if session is not None:
            session.finish(FINALIZE_S)
        elif current is not None:
            current.end("it is closed")
        self._worker.stop()

    def _live_once(self, now: float) -> bool | None:
        """One life of the process, and the pause after it."""
        del now
        try:
            process = ChildProcess(self._name, self._limits.arena_bytes, self._log)
        except OSError as error:
            self._why_away = f"its process cannot be started: {error}"
        else:
            self._why_away = self._live(process)
        self._session = self._current = None
        self._arbiter.changed()
        first = not self._first_tried.is_set()
        self._first_tried.set()
        if self._closed or first:
            return False
        delay_s = self._backoff.next_s()
        log.warning(
            "model %s: instance %s is away, again in %.1f s: %s",
            self._config.name,
            self._name,
            delay_s,
            self._why_away,
        )
        self._worker.wait(delay_s)
        return None

    def _live(self, process: ChildProcess) -> str:
        session = ChildSession(
            self._name,
            self._config.name,
            self._version,
            process,
            outputs=_output_names(self._config),
            metrics=self._metrics,
            server_context=self._server_context,
            decoupled=self._config.decoupled,
        )
        with self._lock:
            self._current = session
            if self._closed:
                session.end("it is closed")

        def started() -> None:
            self._backoff.reset()
            self._session = session
            self._arbiter.changed()
            if self._first_tried.is_set():
                log.info("model %s: instance %s is back", self._config.name, self._name)
            self._first_tried.set()

        return session.live(self._start, self._limits.initialize_s, started)


def _output_names(config: ModelConfig) -> list[str]:
    """What a client may ask for, and what a sequence carries on."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    return [spec.name for spec in config.outputs] + [state.output_name for state in states]
