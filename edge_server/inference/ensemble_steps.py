"""The steps of an ensemble: the plan for a set of outputs, the tensors of each request that follows
it, and the requests to its steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from edge_server.backends.contract import Phases, on_host
from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, InternalError
from edge_server.inference.execution import in_rank, in_shape
from edge_server.inference.statistics import FailureReason
from edge_server.requests import InferRequest, InferResponse, SequencePlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from edge_server.backends.contract import Tensors
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import EnsembleStep, ModelConfig
    from edge_server.requests import Parameters, ResponseCallback, StepTiming
    from edge_server.tensors import Tensor

    Timings = tuple[StepTiming, ...]
    # An ensemble's tensors by name; None is one that its model has left out.
    Made = Mapping[str, Tensor | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step that has to run.

    Attributes:
        index, place: its position in the configuration, and in the plan.
        level: of decoupled steps before it: it runs once for each response of the last of them.
        inputs: pairs of the model's input and the ensemble's tensor.
        outputs: the same for those that are read; `wanted` are the model's names of them.
        reads: the tensors that the step waits for: the ensemble's inputs are there.
        hands_on: a step on a GPU reads one of the outputs."""

    index: int
    place: int
    level: int
    model_name: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    wanted: tuple[str, ...]
    reads: frozenset[str]
    decoupled: bool
    hands_on: bool
    full_shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps that a set of outputs needs, each after those that write its inputs.

    Attributes:
        level: 0 where there is one response, else there is one for each of the last decoupled step.
        reads: the tensors that the response waits for.
        is_chain: each step waits for the one before it, and there is one response."""

    steps: tuple[PlannedStep, ...]
    level: int
    reads: frozenset[str]
    is_chain: bool


def plan_of(config: ModelConfig, outputs: frozenset[str]) -> Plan:
    """The plan for `outputs` of an ensemble whose graph was resolved."""
    given = frozenset(spec.name for spec in config.inputs)
    levels = dict.fromkeys(given, 0)
    needed = _needed(config, outputs)
    read_on_gpu = {
        tensor for _, step, _ in needed if step.on_gpu for tensor in step.input_map.values()
    }
    steps: list[PlannedStep] = []
    for index, step, step_outputs in needed:
        reads = frozenset(step.input_map.values())
        level = max((levels[tensor] for tensor in reads), default=0)
        steps.append(
            PlannedStep(
                index,
                len(steps),
                level,
                step.model_name,
                "" if step.model_version == -1 else str(step.model_version),
                tuple(step.input_map.items()),
                step_outputs,
                tuple(name for name, _ in step_outputs),
                reads - given,
                step.decoupled,
                any(tensor in read_on_gpu for _, tensor in step_outputs),
                step.full_shapes,
            )
        )
        for _, tensor in step_outputs:
            levels[tensor] = level + step.decoupled
    level = max(levels[tensor] for tensor in outputs)
    return Plan(tuple(steps), level, outputs - given, _is_chain(steps))


def _is_chain(steps: Sequence[PlannedStep]) -> bool:
    return not any(step.decoupled for step in steps) and all(
        any(tensor in step.reads for _, tensor in before.outputs)
        for before, step in pairwise(steps)
    )


def _needed(
    config: ModelConfig, outputs: Iterable[str]
) -> list[tuple[int, EnsembleStep, tuple[tuple[str, str], ...]]]:
    """The steps that `outputs` need, in order, each with its outputs that are read."""
    needed = set(outputs)
    found = []
    for index, step in reversed(_in_order(config)):
        wanted = tuple(pair for pair in step.output_map.items() if pair[1] in needed)
        if wanted:
            needed.update(step.input_map.values())
            found.append((index, step, wanted))
    return found[::-1]


def _in_order(config: ModelConfig) -> list[tuple[int, EnsembleStep]]:
    written = {spec.name for spec in config.inputs}
    waiting = list(enumerate(config.steps))
    ordered: list[tuple[int, EnsembleStep]] = []
    while ready := [
        (index, step) for index, step in waiting if written.issuperset(step.input_map.values())
    ]:
        for index, step in ready:
            written.update(step.output_map.values())
            waiting.remove((index, step))
        ordered += ready
    return ordered


class DataSet:
    """Tensors that belong together: the request's own, or those of one response of a decoupled
    step, which worked on `parent`.

    Attributes:
        parts: the responses of the decoupled step that worked on this data set, until they are
            sent.
        all_parts: that step has sent its last response."""

    __slots__ = ("all_parts", "begun", "level", "parent", "parts", "tensors", "timings")

    def __init__(self, parent: DataSet | None, tensors: Made) -> None:
        self.parent = parent
        self.level: int = 0 if parent is None else parent.level + 1
        self.tensors = dict(tensors)
        self.timings: dict[int, Timings] = {}
        self.begun: set[int] = set()
        self.parts: deque[DataSet] = deque()
        self.all_parts = False


Ready = tuple[DataSet, PlannedStep]


class DataFlow:
    """Tracks which steps can run, and which response is complete. Not thread-safe.

    A step reads tensors of its own data set and of the request's own, whenever they come.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        self._plan = plan
        self._root = DataSet(None, tensors)
        # The data sets of decoupled steps that have not been sent.
        self._parts: list[DataSet] = []

    def first(self) -> list[Ready]:
        return list(self._begin(self._root))

    def inputs(self, data: DataSet, step: PlannedStep) -> dict[str, Tensor]:
        own, shared = data.tensors, self._root.tensors
        found = (
            (name, own[tensor] if tensor in own else shared.get(tensor))
            for name, tensor in step.inputs
        )
        return {name: tensor for name, tensor in found if tensor is not None}

    def write(self, data: DataSet, step: PlannedStep, made: Made, timings: Timings) -> list[Ready]:
        """Store the tensors of a response of `step`; return the steps they make ready."""
        if step.decoupled:
            part = DataSet(data, made)
            part.timings[step.place] = timings
            data.parts.append(part)
            self._parts.append(part)
            return list(self._begin(part))
        data.tensors.update(made)
        data.timings[step.place] = timings
        # A tensor of the request's own also serves the data sets of decoupled responses.
        readers = [data, *self._parts] if data is self._root else [data]
        return [ready for reader in readers for ready in self._begin(reader)]

    def next_complete(self) -> DataSet | None:
        """The data set of the next response, once it is complete and all before it are gone."""
        if not self._plan.level:
            return self._root if self._has(self._root, self._plan.reads) else None
        part = self._first(self._root)
        if part is None or not self._has(part, self._plan.reads):
            return None
        self._drop_first(part.parent or self._root)
        return part

    def exhausted(self) -> bool:
        """Whether no response will come any more, after `next_complete`."""
        root = self._root
        if not self._plan.level:
            return self._has(root, self._plan.reads)
        return self._first(root) is None and root.all_parts and not root.parts

    def result(self, data: DataSet) -> tuple[Made, Timings]:
        timings: Timings = ()
        seen: DataSet | None = data
        while seen is not None:
            timings = sum((seen.timings[place] for place in sorted(seen.timings)), ()) + timings
            seen = seen.parent
        return {**self._root.tensors, **data.tensors}, timings

    def _has(self, data: DataSet, tensors: frozenset[str]) -> bool:
        own, shared = data.tensors, self._root.tensors
        return all(tensor in own or tensor in shared for tensor in tensors)

    def _begin(self, data: DataSet) -> Iterator[Ready]:
        for step in self._plan.steps:
            begun = step.place in data.begun
            if step.level == data.level and not begun and self._has(data, step.reads):
                data.begun.add(step.place)
                yield data, step

    def _first(self, data: DataSet) -> DataSet | None:
        """The data set of the next response; drops those before it that give none."""
        while data.parts:
            part = data.parts[0]
            if part.level == self._plan.level:
                return part
            first = self._first(part)
            if first is not None or part.parts or not part.all_parts:
                return first
            self._drop_first(data)
        return None

    def _drop_first(self, data: DataSet) -> None:
        self._parts.remove(data.parts.popleft())


_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


def _sequence_parameters(place: SequencePlace) -> Parameters:
    return dict(zip(_SEQUENCE_PARAMETERS, (place.id, place.start, place.end), strict=True))


_NO_SEQUENCE = _sequence_parameters(SequencePlace(0))


class EnsembleCall:
    def __init__(
        self,
        config: ModelConfig,
        version: str,
        statistics: ModelStatistics,
        request: InferRequest,
        names: Sequence[str],
    ) -> None:
        self.request = request
        self._config = config
        self._version = version
        self._statistics = statistics
        self._names = names
        self._batch_size = 0
        if config.max_batch_size > 0 and request.inputs:
            self._batch_size = next(iter(request.inputs.values())).array.shape[0]
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._responses = 0

    def inputs(self) -> Tensors:
        shapes = self._config.reshapes
        if not shapes:
            return self.request.inputs
        return {
            name: in_shape(tensor, shapes.get(name), self._batch_size)
            for name, tensor in self.request.inputs.items()
        }

    def check_alive(self, step: PlannedStep) -> None:
        """Raise Cancelled or DeadlineExceeded where the caller has gone: `step` need not begin."""
        request = self.request
        if request.cancellation is not None and request.cancellation.cancelled:
            raise Cancelled("")
        if request.deadline is not None and time.monotonic() >= request.deadline:
            raise DeadlineExceeded(
                f"the request's deadline passed before model '{step.model_name}' of ensemble "
                f"'{self._config.name}' began"
            )

    def step_request(self, step: PlannedStep, inputs: Mapping[str, Tensor]) -> InferRequest:
        request = self.request
        if shapes := step.full_shapes:
            inputs = {
                name: in_rank(tensor, shapes[name]) if name in shapes else tensor
                for name, tensor in inputs.items()
            }
        trace = request.trace
        return replace(
            request,
            model_name=step.model_name,
            inputs=inputs,
            model_version=step.version,
            outputs=step.wanted,
            trace=None if trace is None else trace.child(step.model_name, request.id),
            # The model itself brings to the host what nothing on a GPU reads: it may have a faster
            # way there, or write where the host reads.
            on_device=request.on_device or step.hands_on,
        )

    def step_failure(self, step: PlannedStep, error: Exception) -> InternalError:
        log.error(
            "ensemble %s: model %s raised", self._config.name, step.model_name, exc_info=error
        )
        return InternalError(f"model '{step.model_name}' failed: {error!r}")

    def deadlock(self) -> InternalError:
        return InternalError(
            f"in ensemble '{self._config.name}', {self.request.log_prefix}unexpected deadlock, "
            "at least one output is not set while no more ensemble steps can be made"
        )

    def response(self, tensors: Made, timings: tuple[StepTiming, ...]) -> InferResponse:
        """The response whose outputs are among `tensors`; its parameters are the place in the
        sequence, which Triton's ensembles always return."""
        config = self._config
        outputs: dict[str, Tensor] = {}
        for name in self._names:
            if (tensor := tensors.get(name)) is None:
                continue
            if not (self.request.on_device or isinstance(tensor.array, np.ndarray)):
                tensor = on_host(tensor, self._statistics.copied)
            outputs[name] = tensor
        if config.reshapes:
            shapes = {s.name: s.shape for s in config.outputs if s.name in config.reshapes}
            outputs = {
                name: in_shape(tensor, shapes.get(name), self._batch_size)
                for name, tensor in outputs.items()
            }
        if config.mixes_batching:
            full = {spec.name: config.full_shape(spec) for spec in config.outputs}
            outputs = {name: in_rank(tensor, full[name]) for name, tensor in outputs.items()}
        place = self.request.sequence
        parameters = _NO_SEQUENCE if place is None else _sequence_parameters(place)
        return InferResponse(
            config.name, self._version, self.request.id, outputs, timings, parameters
        )

    def count(self, response: ResponseCallback, *, final: bool) -> None:
        now_ns = time.monotonic_ns()
        failed = isinstance(response, EdgeServerError)
        if self._config.decoupled:
            self._statistics.responded(
                self._responses, now_ns - self._last_ns, empty=response is None, failed=failed
            )
            if self._responses == 0:
                self._statistics.first_responded(now_ns - self._began_ns)
            self._responses += 1
            self._last_ns = now_ns
        if self.request.replayed:
            return
        if failed:
            self._statistics.failed(FailureReason.OTHER, now_ns - self._began_ns)
        elif final:
            phases = Phases(0, now_ns - self._began_ns, 0)
            self._statistics.succeeded(phases.infer, 0, phases, max(1, self._batch_size))
