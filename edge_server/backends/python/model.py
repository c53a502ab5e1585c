"""What all instances of a Python model share: configuration, limits, and how a process starts."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.contract import BackendParameters, own_parameters
from edge_server.backends.python.calls import MetricBook
from edge_server.backends.python.child import sandbox
from edge_server.backends.python.in_flight import latest_deadline
from edge_server.backends.python.messages import Start
from edge_server.backends.python.process import ChildProcess, ModelLog
from edge_server.backends.python.session import ChildSession, unhealthy
from edge_server.backends.python.shared_memory import MIB
from edge_server.errors import DeadlineExceeded, EdgeServerError, ModelLoadError
from edge_server.model_config.config import ON_CPU
from edge_server.model_config.parse import config_json
from edge_server.process.backoff import Backoff
from edge_server.process.threads import LOOK_S, GivenUp, require_wanted
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.backends.contract import ExecuteRequest, ModelMetric, Phases, ServerContext
    from edge_server.model_config.config import ModelConfig, Placement


class PythonParameters(BackendParameters, frozen=True):
    """The parameters that the docstring of `backend` lists."""

    execution_timeout_s: float | None = None
    initialize_timeout_s: float = 120.0
    shared_memory_limit_mib: int = 256

    @staticmethod
    def of(config: ModelConfig) -> PythonParameters:
        """Return the parameters; all others of the configuration belong to the model.

        Raises:
            msgspec.ValidationError: a value does not fit its type.
        """
        return own_parameters(config, PythonParameters)

    @property
    def arena_bytes(self) -> int:
        """Size of the shared memory of each direction."""
        return self.shared_memory_limit_mib * MIB


def not_checked(completed: str) -> None:
    """Accept every process: for models that say nothing of themselves."""


@dataclass(frozen=True)
class ModelProgram:
    """What a model's processes run.

    Attributes:
        interpreter: a Python that has what the model imports; empty is the daemon's own.
        runner: see `Start`.
        arguments: more arguments of `initialize`.
        check: called with what a started process says of itself; raises an EdgeServerError for a
            process that must not serve.
    """

    interpreter: str = ""
    runner: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[str], None] = not_checked


USERS_PROGRAM = ModelProgram()


@dataclass(frozen=True)
class ModelContext:
    """One version of a model, as its instances know it.

    Attributes:
        directory: the version directory.
        config: the complete configuration.
        server_context: resolves and loads other models for this model.
        metrics: the model's own.
        program: what its processes run.
    """

    directory: Path
    config: ModelConfig
    parameters: PythonParameters
    server_context: ServerContext
    metrics: MetricBook = field(default_factory=MetricBook)
    program: ModelProgram = USERS_PROGRAM

    @property
    def version(self) -> str:
        return self.directory.name

    @property
    def outputs(self) -> list[str]:
        """The outputs that a client may request, and those that carry a sequence's state."""
        sequences = self.config.sequence_batching
        states = sequences.states if sequences else ()
        return [spec.name for spec in self.config.outputs] + [s.output_name for s in states]


def start_message(
    directory: Path,
    config: ModelConfig,
    instance: str = "",
    *,
    complete: bool = False,
    program: ModelProgram = USERS_PROGRAM,
    placement: Placement = ON_CPU,
) -> Start:
    """Build the first message to a process; as in Triton, the arguments of `initialize` are all
    strings."""
    directory = directory.resolve()
    arguments = {
        "model_config": json.dumps(config_json(config.message)),
        "model_instance_kind": placement.kind,
        "model_instance_name": instance,
        "model_instance_device_id": str(placement.gpu or 0),
        "model_repository": str(directory.parent),
        "model_version": directory.name,
        "model_name": config.name,
        **program.arguments,
    }
    return Start(
        complete,
        arguments,
        str(directory),
        config.default_model_filename,
        str(Path.cwd()),
        config.decoupled,
        sandbox.rules_of(config.completion.python),
        program.runner,
    )


log = logging.getLogger(__name__)

FINALIZE_S = 2.0
# The longest wait for a stand-in process: the daemon's watchdog counts a minute as a hang.
LONGEST_WAIT_S = 25.0
# A process that started well and lived so long is as good as any: the next start is quick again.
STABLE_S = 10.0
# One that started well and died sooner may have been killed by a request: it waits no longer.
_LONGEST_AFTER_START_S = 5.0


class PythonModel:
    """One version of a Python model; each instance runs in its own process.

    Args:
        context: what the instances share.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._arbiter = InstanceArbiter(stand_in=context.config.sequence_batching is None)

    def make_instance(self, name: str, placement: Placement) -> PythonInstance:
        """Start a process and return its instance.

        Raises:
            ModelConfigError: the process does not start, or `initialize` fails.
        """
        instance = PythonInstance(name, self._context, self._arbiter, placement)
        instance.open()
        self._arbiter.add(instance)
        return instance

    def not_ready_reason(self) -> str:
        """Return why no instance can execute now; empty when at least one instance can."""
        reasons = []
        for instance in self._arbiter.instances:
            if not (reason := instance.not_ready_reason()):
                return ""
            reasons.append(reason)
        return "; ".join(reasons)

    def metrics(self) -> Sequence[ModelMetric]:
        """Return the current values of the model's own metrics."""
        return self._context.metrics.metrics()

    def close(self) -> None:
        """Do nothing: the instances, closed before the model, own all resources."""


class PythonInstance:
    """Executes requests in its own process, which the instance restarts whenever the process ends.

    While the process is down, another instance of the model stands in; without another instance,
    requests are refused at once. Construct the instance, then `open` it.

    Args:
        name: of the instance.
        context: of the model.
        arbiter: of the model's instances.
        placement: what the model learns of its device, which it chooses itself.
    """

    def __init__(
        self,
        name: str,
        context: ModelContext,
        arbiter: InstanceArbiter,
        placement: Placement = ON_CPU,
    ) -> None:
        self._name = name
        self._context = context
        self._arbiter = arbiter
        self._started_s: float | None = None
        # When the session last looked after the execution; see `InstancePool.running_since`.
        self.progressed_at = 0.0
        self._model = context.config.name
        self._start = start_message(
            context.directory, context.config, name, program=context.program, placement=placement
        )
        self._log = ModelLog(self._model)
        self._backoff = Backoff(first_s=0.1, longest_s=30.0)
        self._lock = threading.Lock()
        self._closed = False
        self._session: ChildSession | None = None
        # Why the session before ended.
        self._why_down = "it has not started yet"
        self._first_tried = threading.Event()
        self._worker = Worker(name, self._run_session, deadline_s=math.inf)

    def open(self) -> None:
        """Start the process; return when the process can execute.

        Raises:
            ModelLoadError: the first start failed; the text gives the reason. The instance is
                closed.
            GivenUp: see `require_wanted`; likewise.
        """
        self._worker.start()
        try:
            while not self._first_tried.wait(LOOK_S):
                require_wanted()
        except GivenUp:
            self.close()
            raise
        if self._session is None:
            why = self._why_down
            self.close()
            raise ModelLoadError(
                f"{self._start.directory}/{self._start.filename}: instance '{self._name}' does not "
                f"start: {why}"
            )

    @property
    def up(self) -> bool:
        """Return whether the process can execute now."""
        session = self._session
        return session is not None and session.up

    @property
    def _why(self) -> str:
        """Return why the process is down."""
        session = self._session
        return (session is not None and session.why_over) or self._why_down

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        error: EdgeServerError | None = None
        lent: PythonInstance | None = None
        deadline = latest_deadline(requests)
        give_up_at = time.monotonic() + LONGEST_WAIT_S
        try:
            lent = self._arbiter.take(self, min(deadline, give_up_at))
        except DeadlineExceeded as late:
            error = late if deadline <= give_up_at else None
        if lent is not None:
            try:
                return lent.run(requests, self._progressed)
            finally:
                self._arbiter.give_back(lent)
        self._refuse(requests, error)
        return None

    def run(
        self, requests: Sequence[ExecuteRequest], progressed: Callable[[], None]
    ) -> Phases | None:
        """Execute in this instance's own process, which the arbiter has lent to the caller."""
        session = self._session
        if session is not None and session.up:
            return session.execute(requests, progressed)
        self._refuse(requests, None)
        return None

    def not_ready_reason(self) -> str:
        """Return why the instance cannot execute now; empty when the instance can."""
        session = self._session
        why = session.not_ready_reason() if session is not None and session.up else self._why
        return why and f"instance '{self._name}': {why}"

    def close(self) -> None:
        """Let the model finalize, within a time limit, and end the process."""
        self._worker.ask_to_stop()
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            session.finish(FINALIZE_S)
        self._worker.stop()

    def _progressed(self) -> None:
        self.progressed_at = time.monotonic()

    def _refuse(self, requests: Sequence[ExecuteRequest], error: EdgeServerError | None) -> None:
        for request in requests:
            request.respond(error or unhealthy(self._name, self._why), True)

    def _run_session(self, now: float) -> bool | None:
        """Run one session of the process, then wait for the backoff delay."""
        del now
        self._started_s = None
        arena_bytes = self._context.parameters.arena_bytes
        try:
            interpreter = self._context.program.interpreter
            process = ChildProcess(self._name, arena_bytes, self._log, interpreter)
        # Also a ValueError, for a name with a NUL.
        except Exception as error:  # noqa: BLE001  # any other would leave `open` waiting for ever
            self._why_down = f"its process cannot be started: {error}"
        else:
            session = ChildSession(self._name, self._context, process)
            with self._lock:
                self._session = session
                if self._closed:
                    session.end("it is closed")
            self._why_down = session.run(self._start, self._started)
        self._session = None
        self._arbiter.changed()
        first = not self._first_tried.is_set()
        self._first_tried.set()
        if self._closed or first:
            return False
        if self._started_s is not None and time.monotonic() - self._started_s >= STABLE_S:
            self._backoff.reset()
        delay_s = self._backoff.next_s()
        if self._started_s is not None:
            delay_s = min(delay_s, _LONGEST_AFTER_START_S)
        log.warning(
            "model %s: instance %s is down, again in %.1f s: %s",
            self._model,
            self._name,
            delay_s,
            self._why_down,
        )
        self._worker.wait(delay_s)
        return None

    def _started(self) -> None:
        self._started_s = time.monotonic()
        self._arbiter.changed()
        if self._first_tried.is_set():
            log.info("model %s: instance %s is back", self._model, self._name)
        self._first_tried.set()


class InstanceArbiter:
    """Lends each of a model's processes to one batch at a time.

    While a process is down, the others also execute its batches. Without stand-ins the instance
    that is down would draw every request to itself, because an instance that refuses is idle again
    at once.

    Args:
        stand_in: an instance may execute another's batch; False where a sequence has its state in
            one process.
    """

    def __init__(self, *, stand_in: bool) -> None:
        self.instances: list[PythonInstance] = []
        self._stand_in = stand_in
        self._change = threading.Condition()
        self._busy: list[PythonInstance] = []

    def add(self, instance: PythonInstance) -> None:
        """Add an instance that may stand in for the others."""
        with self._change:
            self.instances.append(instance)

    def take(self, own: PythonInstance, deadline: float) -> PythonInstance | None:
        """Lend `own`; while `own` is down, lend the first instance that is up and free.

        Returns:
            None when no instance is up.

        Raises:
            DeadlineExceeded: no instance became free before `deadline` (`time.monotonic()`;
                infinity waits forever).
        """
        with self._change:
            while True:
                candidates = [own] if own.up or not self._stand_in else self.instances
                up = [instance for instance in candidates if instance.up]
                if not up:
                    return None
                for instance in up:
                    if instance not in self._busy:
                        self._busy.append(instance)
                        return instance
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._change.wait(None if left_s == math.inf else left_s):
                    raise DeadlineExceeded(
                        "the request's deadline passed before an instance was idle"
                    )

    def give_back(self, instance: PythonInstance) -> None:
        with self._change:
            self._busy.remove(instance)
            self._change.notify_all()

    def changed(self) -> None:
        """Wake the waiting callers after an instance has come up or gone down."""
        with self._change:
            self._change.notify_all()
