"""The plan of an ensemble for one set of outputs: computed once, followed per request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from edge_server.model_config.config import EnsembleStep, ModelConfig


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step that has to run.

    Attributes:
        index: its position in the configuration.
        place: its position in the plan.
        level: number of decoupled steps before it: the step runs once for each response of the
            last of them.
        version: as requests spell it.
        inputs: pairs of the model's input and the ensemble's tensor.
        outputs: the same for the outputs that a step or the response reads.
        wanted: the model's names of `outputs`.
        reads: the tensors of `inputs`, each once.
        decoupled: each of its responses starts a level of its own.
        hands_on: another step reads an output; otherwise only the response does.
    """

    index: int
    place: int
    level: int
    model_name: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    wanted: tuple[str, ...]
    reads: tuple[str, ...]
    decoupled: bool
    hands_on: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps that a set of outputs needs.

    Attributes:
        steps: each after the steps that write its inputs.
        level: of the response: 0 where there is one, else one response is sent for each response
            of the last decoupled step.
        outputs: the tensors that the response waits for.
        missing: for each step, and last for the response, how many tensors it waits for when a
            request comes.
        first: the steps that wait for nothing.
        readers: tensor → the places of the steps that wait for it; `len(steps)` is the response.
        given: the ensemble's inputs; an optional one may be absent.
        is_chain: each step waits for the one before it, and there is one response.
    """

    steps: tuple[PlannedStep, ...]
    level: int
    outputs: tuple[str, ...]
    missing: tuple[int, ...]
    first: tuple[PlannedStep, ...]
    readers: Mapping[str, tuple[int, ...]]
    given: frozenset[str]
    is_chain: bool

    @property
    def response_place(self) -> int:
        """The place of the response."""
        return len(self.steps)

    def reads(self, place: int) -> tuple[str, ...]:
        return self.outputs if place == self.response_place else self.steps[place].reads

    def level_of(self, place: int) -> int:
        return self.level if place == self.response_place else self.steps[place].level


def plan_of(config: ModelConfig, outputs: frozenset[str]) -> Plan:
    """The plan for `outputs` of an ensemble whose graph has been resolved."""
    steps: list[PlannedStep] = []
    given = frozenset(spec.name for spec in config.inputs)
    levels = dict.fromkeys(given, 0)
    needed = _needed(config, outputs)
    read_by_steps = {tensor for _, step, _ in needed for tensor in step.input_map.values()}
    for index, step, wanted in needed:
        reads = tuple(dict.fromkeys(step.input_map.values()))
        level = max((levels[tensor] for tensor in reads), default=0)
        hands_on = any(tensor in read_by_steps for _, tensor in wanted)
        steps.append(_planned(index, len(steps), level, step, wanted, hands_on=hands_on))
        for _, tensor in wanted:
            levels[tensor] = level + step.decoupled
    readers: dict[str, list[int]] = {tensor: [] for tensor in levels}
    tensors = tuple(sorted(outputs))
    for place, reads in enumerate([*(step.reads for step in steps), tensors]):
        for tensor in reads:
            readers[tensor].append(place)
    missing = [sum(tensor not in given for tensor in step.reads) for step in steps]
    return Plan(
        tuple(steps),
        max(levels[tensor] for tensor in tensors),
        tensors,
        (*missing, sum(tensor not in given for tensor in tensors)),
        tuple(step for step, count in zip(steps, missing, strict=True) if not count),
        {tensor: tuple(places) for tensor, places in readers.items()},
        given,
        _is_chain(steps),
    )


def _is_chain(steps: Sequence[PlannedStep]) -> bool:
    return not any(step.decoupled for step in steps) and all(
        any(tensor in step.reads for _, tensor in before.outputs)
        for before, step in pairwise(steps)
    )


def _planned(
    index: int,
    place: int,
    level: int,
    step: EnsembleStep,
    outputs: tuple[tuple[str, str], ...],
    *,
    hands_on: bool,
) -> PlannedStep:
    return PlannedStep(
        index,
        place,
        level,
        step.model_name,
        "" if step.model_version == -1 else str(step.model_version),
        tuple(step.input_map.items()),
        outputs,
        tuple(name for name, _ in outputs),
        tuple(dict.fromkeys(step.input_map.values())),
        step.decoupled,
        hands_on,
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
    """The steps, ordered so that each comes after those that write its inputs."""
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
