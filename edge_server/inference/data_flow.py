"""The tensors of one request in an ensemble: which are there, and which steps can run next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from edge_server.inference.ensemble_plan import Plan, PlannedStep
    from edge_server.requests import StepTiming
    from edge_server.tensors import Tensor

    Timings = tuple[StepTiming, ...]


class DataSet:
    """Tensors that belong together: the request's own, or those of one decoupled response.

    Attributes:
        parent: the data set that the decoupled step worked on; None for the request's own.
        missing: for each place of the plan, how many tensors it still waits for.
        complete: all tensors of the response are there.
        parts: the responses of the decoupled step that worked on this data set, in order, until
            they have been sent.
        all_parts: the decoupled step has sent its last response.
    """

    __slots__ = (
        "all_parts",
        "complete",
        "level",
        "missing",
        "parent",
        "parts",
        "tensors",
        "timings",
    )

    def __init__(
        self, parent: DataSet | None, tensors: dict[str, Tensor], missing: Sequence[int]
    ) -> None:
        self.parent = parent
        self.level: int = 0 if parent is None else parent.level + 1
        self.tensors = tensors
        self.missing = list(missing)
        self.timings: list[Timings] = [()] * len(missing)
        self.complete = False
        self.parts: deque[DataSet] = deque()
        self.all_parts = False


Ready = tuple[DataSet, "PlannedStep"]


class DataFlow:
    """Tracks which steps can run, and which response is complete. Not thread-safe.

    A step reads tensors of its own data set and of the request's own, whenever they come.
    """

    def __init__(self, plan: Plan, tensors: dict[str, Tensor]) -> None:
        self._plan = plan
        self.root = DataSet(None, tensors, plan.missing)
        self.root.complete = not plan.missing[-1]
        # The data sets of decoupled steps that have not been sent.
        self._parts: list[DataSet] = []

    def inputs(self, data: DataSet, step: PlannedStep) -> dict[str, Tensor]:
        """The inputs of `step`; an optional input of the ensemble may be absent."""
        own, shared = data.tensors, self.root.tensors
        return {
            name: own[tensor] if tensor in own else shared[tensor]
            for name, tensor in step.inputs
            if tensor in own or tensor in shared
        }

    def write(
        self, data: DataSet, step: PlannedStep, made: dict[str, Tensor], timings: Timings
    ) -> list[Ready]:
        """Store the tensors of a response of `step`; return the steps they make ready."""
        if step.decoupled:
            part = DataSet(data, made, [0] * len(data.missing))
            part.timings[step.place] = timings
            data.parts.append(part)
            self._parts.append(part)
            return list(self._begin(part))
        data.tensors.update(made)
        data.timings[step.place] = timings
        return list(self._follow(data, made))

    def next_complete(self) -> DataSet | None:
        """The data set of the next response, once it is complete and all before it are gone."""
        if not self._plan.level:
            return self.root if self.root.complete else None
        part = self._first(self.root)
        if part is None or not part.complete:
            return None
        self._drop_first(part.parent or self.root)
        return part

    def exhausted(self) -> bool:
        """Whether no response will come any more, after `next_complete`."""
        if not self._plan.level:
            return self.root.complete
        return self._first(self.root) is None and self.root.all_parts and not self.root.parts

    def result(self, data: DataSet) -> tuple[Mapping[str, Tensor], Timings]:
        """The tensors that `data` sees, and the timings of the models behind them."""
        timings: Timings = ()
        seen: DataSet | None = data
        while seen is not None:
            timings = sum(seen.timings, ()) + timings
            seen = seen.parent
        return {**self.root.tensors, **data.tensors}, timings

    def _follow(self, data: DataSet, made: Iterable[str]) -> Iterator[Ready]:
        plan = self._plan
        for tensor in made:
            for place in plan.readers[tensor]:
                level = plan.level_of(place)
                if level == data.level:
                    yield from self._one_less(data, place)
                    continue
                # A tensor of the request's own also serves the data sets of decoupled responses.
                for part in self._parts:
                    if part.level == level:
                        yield from self._one_less(part, place)

    def _begin(self, part: DataSet) -> Iterator[Ready]:
        plan, there = self._plan, part.tensors.keys() | self.root.tensors.keys()
        for place in range(len(part.missing)):
            if plan.level_of(place) == part.level:
                waits_for = set(plan.reads(place)) - there - plan.given
                part.missing[place] = len(waits_for) + 1
                yield from self._one_less(part, place)

    def _one_less(self, data: DataSet, place: int) -> Iterator[Ready]:
        data.missing[place] -= 1
        if data.missing[place]:
            return
        if place == self._plan.response_place:
            data.complete = True
        else:
            yield data, self._plan.steps[place]

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
