"""What all instances of a Python model share: configuration, limits, program, log; and its metrics,
which the daemon keeps, so that they survive a restart of the process."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from typing import TYPE_CHECKING, Annotated

import msgspec

from edge_server.backends.contract import STANDALONE, BackendParameters, ModelMetric
from edge_server.backends.python import sandbox
from edge_server.backends.python.environments import NO_ENVIRONMENT, Environment
from edge_server.backends.python.messages import Start
from edge_server.backends.python.shared_memory import MIB
from edge_server.errors import InvalidRequest
from edge_server.model_config.config import ON_CPU
from edge_server.model_config.parse import config_json
from edge_server.process.histogram import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from edge_server.backends.contract import MetricKind, ServerContext
    from edge_server.backends.python.messages import ChangeMetric, MakeFamily, MakeMetric
    from edge_server.model_config.config import ModelConfig, Placement

# Prometheus's rule for metric names.
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
# Prefixes of the server's own metrics; two metrics of one name make the whole page unreadable.
_TAKEN = ("nv_", "edge_", "process_")
# The limit on metrics of one model: a label with ever new values would fill the memory and the
# page.
_MOST = 1000
_LONGEST = 4096
_MOST_BUCKETS = 256


class MetricBook:
    """The metrics of one model, shared by its instances; each metric has a number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, tuple[str, MetricKind]] = {}
        self._numbers: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self._metrics: list[_Metric] = []

    def make_family(self, message: MakeFamily) -> None:
        """Reserve the name for metrics of that kind; the first description is kept. Raises
        InvalidRequest where it cannot be that of such metrics, or the model has too many."""
        name = message.name
        _check_length(name, (name, message.description))
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"'{name}' cannot be a metric's name: letters, digits, '_' and ':'"
            )
        if name.startswith(_TAKEN):
            raise InvalidRequest(
                f"metric '{name}': names with {', '.join(_TAKEN)} are the server's own"
            )
        with self._lock:
            if name not in self._families and len(self._families) >= _MOST:
                raise InvalidRequest(f"metric '{name}': a model has at most {_MOST} families")
            _, kind = self._families.setdefault(name, (message.description, message.kind))
        if kind != message.kind:
            raise InvalidRequest(f"metric '{name}' is a {kind} already, no {message.kind}")

    def make(self, message: MakeMetric) -> int:
        """Return the number of the metric; an existing one keeps its number. Raises
        InvalidRequest."""
        name, labels, bounds = message.family.name, message.labels, tuple(message.buckets)
        self.make_family(message.family)
        _check_length(name, (*labels, *labels.values()))
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise InvalidRequest(
                    f"metric '{name}': '{label}' cannot be a label: letters, digits, '_'"
                )
        if len(bounds) > _MOST_BUCKETS:
            raise InvalidRequest(f"metric '{name}': {len(bounds)} buckets; at most {_MOST_BUCKETS}")
        is_histogram = message.family.kind == "histogram"
        if is_histogram and "le" in labels:
            raise InvalidRequest(f"metric '{name}': 'le' is a histogram's own label")
        if any(map(isnan, bounds)) or any(a >= b for a, b in pairwise(bounds)):
            raise InvalidRequest(f"metric '{name}': its buckets do not ascend: {list(bounds)}")
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            if key not in self._numbers:
                if len(self._metrics) >= _MOST:
                    raise InvalidRequest(f"metric '{name}': a model has at most {_MOST} metrics")
                self._numbers[key] = len(self._metrics)
                self._metrics.append(_Metric(name, labels, bounds if is_histogram else None))
            return self._numbers[key]

    def change(self, message: ChangeMetric) -> None:
        with self._lock:
            metric, value = self._metrics[message.metric], message.value
            if message.action == "set":
                metric.value = value
                return
            metric.value += value
            if message.action == "observe":
                metric.observed.add(value)

    def value(self, number: int) -> float:
        with self._lock:
            return self._metrics[number].value

    def metrics(self) -> tuple[ModelMetric, ...]:
        with self._lock:
            return tuple(
                ModelMetric(m.name, *self._families[m.name], m.labels, m.value, m.buckets())
                for m in self._metrics
            )


def _check_length(name: str, texts: Iterable[str]) -> None:
    if sum(map(len, texts)) > _LONGEST:
        raise InvalidRequest(
            f"metric '{name[:64]}': its texts have more than {_LONGEST} characters"
        )


class _Metric:
    def __init__(
        self, name: str, labels: Mapping[str, str], bounds: tuple[float, ...] | None
    ) -> None:
        self.name = name
        self.labels = labels
        self.bounds = bounds
        self.value = 0.0
        self.observed = Buckets(bounds or ())

    def buckets(self) -> dict[float, int]:
        if self.bounds is None:
            return {}
        return dict(zip((*self.bounds, float("inf")), self.observed.now().at_most, strict=True))


log = logging.getLogger(__name__)

# The rate limit protects the journal, or the disk; a model that writes more than this is faulty.
PER_SECOND_BYTES = 8 << 10
AT_ONCE_BYTES = 256 << 10
LONGEST_LINE_BYTES = 8 << 10
# The minimum cost of a line, for the time, level and name that the log adds.
SHORTEST_LINE_BYTES = 64


class ModelLog:
    """Logs a model's lines, at most 8 KiB a second, 256 KiB in a burst. Thread-safe."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._left_bytes = float(AT_ONCE_BYTES)
        self._at = clock()
        self._dropped = 0
        self._begun = b""

    def line(self, level: int, text: str) -> bool:
        """Log a text of the model's logger, of one line or more; return False where the text is
        dropped."""
        short = text[:LONGEST_LINE_BYTES]
        n_bytes = max(len(short), SHORTEST_LINE_BYTES)
        with self._lock:
            before, self._at = self._at, self._clock()
            regained = (self._at - before) * PER_SECOND_BYTES
            self._left_bytes = min(AT_ONCE_BYTES, self._left_bytes + regained)
            # After a drop, lines resume a second's worth at a time, each time with a warning.
            if self._left_bytes < (max(n_bytes, PER_SECOND_BYTES) if self._dropped else n_bytes):
                self._dropped += 1
                return False
            self._left_bytes -= n_bytes
            dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning(
                "model %s: %d lines of its log were dropped: it writes more than %d bytes a second",
                self._model,
                dropped,
                PER_SECOND_BYTES,
            )
        log.log(level, "model %s: %s%s", self._model, short, "" if short == text else " …")
        return True

    def printed(self, data: bytes) -> None:
        """Log the complete lines in `data` from the model's standard output or error."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for index, line in enumerate(lines):
            if not self.line(logging.INFO, line.decode(errors="backslashreplace")):
                # Parsing each line of a flood would delay the daemon's other threads.
                with self._lock:
                    self._dropped += len(lines) - index - 1
                break
        if len(self._begun) > LONGEST_LINE_BYTES:
            self.end()

    def end(self) -> None:
        begun, self._begun = self._begun, b""
        if begun:
            self.line(logging.INFO, begun.decode(errors="backslashreplace"))


_Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class PythonParameters(BackendParameters, frozen=True):
    """Parameters of config.pbtxt.

    Attributes:
        execution_timeout_s: the daemon kills a process whose `execute` takes longer. Without it,
            one whose `execute` has used no processor time for 30 s, as one that hangs, or takes
            longer than 600 s. Work that only waits, e.g. for another machine, needs it.
        initialize_timeout_s: likewise for `initialize` and `auto_complete_config`.
        shared_memory_limit_mib: limits the memory that the tensors of one instance, and the files
            with which it loads models, may take in each direction. It grows from zero as needed,
            and stays allocated until the process ends.
    """

    execution_timeout_s: _Seconds | None = None
    initialize_timeout_s: _Seconds = 120.0
    shared_memory_limit_mib: Annotated[int, msgspec.Meta(gt=0, le=1 << 16)] = 256

    @property
    def arena_bytes(self) -> int:
        return self.shared_memory_limit_mib * MIB


@dataclass(frozen=True)
class ModelProgram:
    """What a model's processes run.

    Attributes:
        interpreter: a Python that has what the model imports; empty is the daemon's own.
        runner: see `Start`.
        arguments: more arguments of `initialize`.
        environment: the packages that the model brings.
        check: called with what a started process says of itself; raises an EdgeServerError for one
            that must not serve."""

    interpreter: str = ""
    runner: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    environment: Environment = NO_ENVIRONMENT
    check: Callable[[str], object] = str


@dataclass(frozen=True)
class ModelContext:
    """One version of a model, as its instances know it; `server_context` resolves and loads other
    models."""

    directory: Path
    config: ModelConfig
    parameters: PythonParameters
    server_context: ServerContext = STANDALONE
    metrics: MetricBook = field(default_factory=MetricBook)
    program: ModelProgram = ModelProgram()

    @property
    def version(self) -> str:
        return self.directory.name

    @property
    def path(self) -> Path:
        return self.directory / self.config.default_model_filename

    @property
    def outputs(self) -> list[str]:
        sequences = self.config.sequence_batching
        states = sequences.states if sequences else ()
        return [spec.name for spec in self.config.outputs] + [s.output_name for s in states]

    def start(
        self, instance: str = "", placement: Placement = ON_CPU, *, complete: bool = False
    ) -> Start:
        """Return the first message to a process; as in Triton, the arguments of `initialize` are
        all strings."""
        config, program, directory = self.config, self.program, self.directory.resolve()
        rules = sandbox.rules_of(config.completion.python)
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
            sandbox.working_directory(rules),
            config.decoupled,
            rules,
            program.runner,
            config.program,
            program.environment.root,
            program.environment.packages,
        )
