"""`python`: a user's `model.py`, unchanged, in its own process.

A process that crashes, hangs or never returns costs only the requests that it executes; the daemon
kills the process once no client waits for these requests any more, and restarts it with growing
delays. Until then the model is not ready.

In control mode EXPLICIT the model may load and unload other models from `initialize` to `finalize`.
A load counts towards the time limit of the `initialize` or `execute` that waits for it, and
continues after that limit; a load that takes minutes belongs in `initialize`.

`settings.Python` sets the sandbox of the process; see docs/python_models.md.

`PythonParameters` are this backend's, and `EXECUTION_ENV_PATH` (see `environments`); all others
belong to the model. Tensors are always in host memory, as `FORCE_CPU_ONLY_INPUT_TENSORS` has it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.contract import Model, check_parameters, parameters_of
from edge_server.backends.python import messages as m
from edge_server.backends.python import sandbox
from edge_server.backends.python.context import (
    ModelContext,
    ModelLog,
    ModelProgram,
    PythonParameters,
)
from edge_server.backends.python.environments import environment_of, interpreter_of
from edge_server.backends.python.in_flight import latest_deadline
from edge_server.backends.python.session import ChildProcess, ChildSession, unhealthy
from edge_server.errors import (
    DeadlineExceeded,
    EdgeServerError,
    InvalidRequest,
    ModelConfigError,
    ModelLoadError,
)
from edge_server.model_config.completion import complete_scheduling
from edge_server.model_config.config import ON_CPU, Completion, ModelConfig
from edge_server.model_config.files import require_path
from edge_server.model_config.parse import NO_EFFECT, parse_model_config_json
from edge_server.model_config.validation import validate
from edge_server.process.child import ChannelClosed, private_bytes
from edge_server.process.threads import LOOK_S, Backoff, GivenUp, Worker, require_wanted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.contract import (
        ExecuteRequest,
        LoadContext,
        MemoryKind,
        ModelMetric,
        Phases,
    )
    from edge_server.model_config.config import Placement
    from edge_server.model_config.files import ModelFiles

log = logging.getLogger(__name__)

_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete the configuration with the model's `auto_complete_config`, which runs in its own
    process, within `initialize_timeout_s`, and validate the result."""
    directory = files.versions[version]
    filename = config.default_model_filename
    if "/" in filename or not filename.endswith(".py") or not filename[:-3].isidentifier():
        raise ModelConfigError(
            f"{files.config_path}: default_model_filename '{filename}': a Python model is a file "
            "of the version directory that can be imported, such as model.py"
        )
    require_path(Path(config.program or directory, filename), config.name)
    parameters = check_parameters(files, config, PythonParameters, others=True)
    context = ModelContext(directory, config, parameters, program=_program(directory, config))
    if config.completion.auto and (completed := run_for_completion(context)):
        config = _merged(files, config, completed)
    if config.max_batch_size > 0 and not config.inputs:
        raise ModelConfigError(
            f"{files.config_path}: model '{config.name}' has no inputs, and batches: name them in "
            "config.pbtxt, or in its auto_complete_config"
        )
    validate(config.message, files, frozenset({config.message.backend}), Completion(auto=False))
    return config


def load(context: LoadContext) -> PythonModel:
    """Return the model; no process starts before its first instance is made."""
    directory, config = context.directory, context.config
    check_sandbox(directory / config.default_model_filename, config, warn=True)
    if config.parameters.get(_FORCE_CPU, "yes").lower() == "no":
        log.warning(
            "model %s: parameter '%s' %s: a Python model's tensors are on the host",
            config.name,
            _FORCE_CPU,
            NO_EFFECT,
        )
    program = _program(directory, config, warn=True)
    parameters = parameters_of(config, PythonParameters)
    return PythonModel(ModelContext(directory, config, parameters, context.server, program=program))


def _program(directory: Path, config: ModelConfig, *, warn: bool = False) -> ModelProgram:
    interpreter = interpreter_of(config, {})
    environment = environment_of(directory, config, interpreter, warn=warn)
    return ModelProgram(interpreter.path, environment=environment)


def check_sandbox(path: Path, config: ModelConfig, *, warn: bool = False) -> None:
    """Refuse the model at `path` where it needs a whole sandbox, and this kernel has none."""
    settings = config.completion.python
    lacking = sandbox.lacking(sandbox.rules_of(settings))
    if lacking and settings.sandbox == "require":
        raise ModelConfigError(
            f"{path}: a whole sandbox is required, and this kernel has {'; '.join(lacking)}; "
            '[python] sandbox = "auto" runs models with what there is'
        )
    for line in lacking if warn else ():
        log.warning("model %s: its sandbox is not whole: this kernel has %s", config.name, line)


def run_for_completion(context: ModelContext) -> str:
    """Return as JSON what the model makes of its configuration, in its own process: a user's model
    the completed one, empty where it has no function for that; a framework's its signature.
    """
    path, name = context.path, context.config.name
    check_sandbox(path, context.config)
    within_s = context.parameters.initialize_timeout_s
    try:
        process = ChildProcess(name, context, ModelLog(name))
    except OSError as error:
        raise ModelLoadError(f"{path}: no process can be started: {error}") from error

    def refuse(message: m.FromChild) -> None:
        if isinstance(message, m.Query):
            # A module makes its families where it is imported.
            known = isinstance(message.what, m.MakeFamily)
            failure = "" if known else "the server keeps no metrics of 'auto_complete_config'"
            process.channel.send(m.QueryResult(message.number, failure=failure))

    try:
        started = process.start(context.start(complete=True), within_s, other=refuse)
    except ChannelClosed:
        raise ModelLoadError(f"{path}: auto_complete_config: {process.ending()}") from None
    finally:
        process.kill()
        process.ending()
    if started is None:
        raise ModelLoadError(
            f"{path}: auto_complete_config did not return within {within_s:g} s; parameter "
            "'initialize_timeout_s' allows more"
        )
    if started.failure:
        raise ModelLoadError(f"{path}: {m.shortened(started.failure)}")
    return started.completed


def _merged(files: ModelFiles, config: ModelConfig, completed: str) -> ModelConfig:
    """Return the configuration merged with only those fields that a model may complete."""
    try:
        theirs = parse_model_config_json(completed, config.name)
    except InvalidRequest as error:
        reason = str(error).removeprefix("Invalid config override: ")
        raise ModelConfigError(
            f"{files.config_path}: what auto_complete_config returned is no configuration: {reason}"
        ) from error
    message = type(theirs)()
    message.CopyFrom(config.message)
    message.max_batch_size = theirs.max_batch_size
    for field in ("input", "output"):
        message.ClearField(field)
        getattr(message, field).extend(getattr(theirs, field))
    for field in ("dynamic_batching", "model_transaction_policy"):
        if theirs.HasField(field):
            getattr(message, field).CopyFrom(getattr(theirs, field))
            getattr(message, field).SetInParent()
    complete_scheduling(message)
    return ModelConfig.of(message, config.completion)


FINALIZE_S = 2.0
# The longest wait for a stand-in process: the daemon's watchdog counts a minute as a hang.
LONGEST_WAIT_S = 25.0
# A process that started well and lived so long is as good as any: the next start is quick again.
STABLE_S = 10.0
# One that started well and died sooner may have been killed by a request: it waits no longer.
_LONGEST_AFTER_START_S = 5.0


class PythonModel(Model):
    """One version of a Python model; lends each of its instances' processes to one batch at a time.
    While a process is down, the others execute its batches, except where a sequence has its state
    in one process: an instance that refuses is idle again at once, and would draw every request to
    itself."""

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self.instances: list[PythonInstance] = []
        self._stand_in = context.config.sequence_batching is None
        self._change = threading.Condition()
        self._busy: list[PythonInstance] = []

    def make_instance(self, name: str, placement: Placement) -> PythonInstance:
        """Return a new instance, or the one of that name and place that runs: where only instance
        groups have changed, the model's next scheduler has it beside the one that ends."""
        with self._change:
            for instance in self.instances:
                if (instance.name, instance.placement) == (name, placement):
                    instance.users += 1
                    return instance
        instance = PythonInstance(name, self._context, self, placement)
        instance.open()
        with self._change:
            self.instances.append(instance)
        return instance

    def not_ready_reason(self) -> str:
        """Return why no instance can execute now; empty when at least one instance can."""
        reasons = []
        for instance in list(self.instances):
            if not (reason := instance.not_ready_reason()):
                return ""
            reasons.append(reason)
        return "; ".join(reasons)

    def metrics(self) -> Sequence[ModelMetric]:
        return self._context.metrics.metrics()

    def memory_bytes(self) -> Mapping[MemoryKind, int]:
        sessions = [instance.session for instance in list(self.instances)]
        running = (session for session in sessions if session is not None)
        return {"processes": sum(private_bytes(session.pid) for session in running)}

    def lend(self, own: PythonInstance, deadline: float) -> PythonInstance | None:
        """Lend `own`; while it is down, the first instance that is up and free, or None. Raises
        DeadlineExceeded where none became free before `deadline` (`time.monotonic()`, or
        infinity)."""
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

    def leave(self, instance: PythonInstance) -> bool:
        """Return whether this was the last user of `instance`, which then ends."""
        with self._change:
            instance.users -= 1
            if not instance.users and instance in self.instances:
                self.instances.remove(instance)
            return not instance.users

    def changed(self) -> None:
        """Wake the waiting callers after an instance has come up or gone down."""
        with self._change:
            self._change.notify_all()


class PythonInstance:
    """Executes requests in its own process, which the instance restarts whenever the process ends.
    Then another instance of the model stands in; without one, requests are refused at once.
    Construct the instance, then `open` it."""

    def __init__(
        self,
        name: str,
        context: ModelContext,
        model: PythonModel,
        placement: Placement = ON_CPU,
    ) -> None:
        self.name = name
        self.placement = placement
        self.users = 1
        self._context = context
        self._model = model
        self._started_s: float | None = None
        # When the session last looked after the execution; see `InstancePool.running_since`.
        self.progressed_at = 0.0
        self._model_name = context.config.name
        self._start = context.start(name, placement)
        self._log = ModelLog(self._model_name)
        self._backoff = Backoff(first_s=0.1, longest_s=30.0)
        self._lock = threading.Lock()
        self._closed = False
        self._session: ChildSession | None = None
        # Why the session before ended.
        self._why_down = "it has not started yet"
        self._first_tried = threading.Event()
        self._worker = Worker(name, self._run_session, deadline_s=math.inf)

    def open(self) -> None:
        """Start the process; return when it can execute. Raises ModelLoadError where the first
        start failed, or GivenUp (see `require_wanted`); the instance is closed then."""
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
                f"{self._start.directory}/{self._start.filename}: instance '{self.name}' does not "
                f"start: {why}"
            )

    @property
    def session(self) -> ChildSession | None:
        """The session that can execute; None while there is none."""
        session = self._session
        return session if session is not None and session.up else None

    @property
    def up(self) -> bool:
        return self.session is not None

    @property
    def _why(self) -> str:
        session = self._session
        return (session is not None and session.why_over) or self._why_down

    def execute(self, requests: Sequence[ExecuteRequest]) -> Phases | None:
        error: EdgeServerError | None = None
        lent: PythonInstance | None = None
        deadline = latest_deadline(requests)
        give_up_at = time.monotonic() + LONGEST_WAIT_S
        try:
            lent = self._model.lend(self, min(deadline, give_up_at))
        except DeadlineExceeded as late:
            error = late if deadline <= give_up_at else None
        if lent is not None:
            try:
                if (session := lent.session) is not None:
                    return session.execute(requests, self._progressed)
            finally:
                self._model.give_back(lent)
        for request in requests:
            request.respond(error or unhealthy(self.name, self._why), True)
        return None

    def not_ready_reason(self) -> str:
        session = self.session
        why = self._why if session is None else session.not_ready_reason()
        return why and f"instance '{self.name}': {why}"

    def close(self) -> None:
        """Let the model finalize, within a time limit, and end the process, with its last user."""
        if not self._model.leave(self):
            return
        self._worker.ask_to_stop()
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            session.finish(FINALIZE_S)
        self._worker.stop()

    def _progressed(self) -> None:
        self.progressed_at = time.monotonic()

    def _run_session(self, now: float) -> bool | None:
        """Run one session of the process, then wait for the backoff delay."""
        del now
        self._started_s = None
        try:
            process = ChildProcess(self.name, self._context, self._log)
        # Also a ValueError, for a name with a NUL.
        except Exception as error:  # noqa: BLE001  # any other would leave `open` waiting for ever
            self._why_down = f"its process cannot be started: {error}"
        else:
            session = ChildSession(self.name, self._context, process)
            with self._lock:
                self._session = session
                if self._closed:
                    session.end("it is closed")
            self._why_down = session.run(self._start, self._started)
        self._session = None
        self._model.changed()
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
            self._model_name,
            self.name,
            delay_s,
            self._why_down,
        )
        self._worker.wait(delay_s)
        return None

    def _started(self) -> None:
        self._started_s = time.monotonic()
        self._model.changed()
        if self._first_tried.is_set():
            log.info("model %s: instance %s is back", self._model_name, self.name)
        self._first_tried.set()
