"""An instance of a Python model: one process, restarted whenever it ends."""

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

# The minimum duration granted to an execution, even where its callers' deadlines are shorter: short
# deadlines must not kill a slow process that other callers use.
LEAST_EXECUTION_S = 1.0
FINALIZE_S = 2.0
# The limit for the wait for a stand-in process and the execution there together: the daemon's
# watchdog counts a minute as a hang.
LONGEST_TURN_S = 55.0


@dataclass(frozen=True)
class ChildLimits:
    """Time limits of the model's code, and the size of the shared memory of each direction."""

    execution_s: float
    initialize_s: float
    arena_bytes: int


class PythonInstance:
    """Executes requests in its own process, which the instance restarts whenever the process ends.

    While the process is down, another instance of the model stands in; without another instance,
    requests are refused at once. Construct the instance, then `open` it.

    Args:
        name: of the instance.
        start: the first message to the process.
        config: of the model.
        version: the model's version.
        metrics: of the model.
        arbiter: of the model's instances.
        server_context: resolves and loads other models for this model.
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
        # The session that is alive, and the session that can execute; set in that order.
        self._current: ChildSession | None = None
        self._session: ChildSession | None = None
        self._why_away = "it has not started yet"
        self._first_tried = threading.Event()
        # The kernel ends a process with the thread that started it, so that thread must stay alive.
        self._worker = Worker(name, self._live_once, deadline_s=math.inf)

    def open(self) -> None:
        """Start the process; return when the process can execute.

        Raises:
            ModelLoadError: the first start failed; the text gives the reason. The instance is
                closed.
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
        """Return whether the process can execute now."""
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
        """Execute in this instance's own process, which the arbiter has lent to the caller."""
        session = self._session
        if session is not None:
            return session.execute(requests, self._limits.execution_s, LEAST_EXECUTION_S)
        for request in requests:
            request.respond(unhealthy(self._name, self._why), True)
        return None

    @property
    def _why(self) -> str:
        """Return why the process is down."""
        session = self._session
        return self._why_away if session is None else session.why_over

    def not_ready_reason(self) -> str:
        """Return why the instance cannot execute now; empty when the instance can."""
        session = self._session
        why = self._why_away if session is None else session.not_ready_reason()
        return why and f"instance '{self._name}': {why}"

    def close(self) -> None:
        """Let the model finalize, within a time limit, and end the process."""
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
        """Run one session of the process, then wait for the backoff delay."""
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
    """Return the outputs that a client may request, and those that carry a sequence's state."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    return [spec.name for spec in config.outputs] + [state.output_name for state in states]
