"""What an ensemble does for one set of wanted outputs: worked out once, walked per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.model_config.config import EnsembleStep, ModelConfig


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step that has to run.

    Attributes:
        index: its place in the configuration.
        place: its place in the plan.
        level: how many decoupled steps lie before it: it runs once for each response of the
            last of them.
        version: as requests spell it.
        inputs: the model's input and the ensemble's tensor, in pairs.
        outputs: those that something reads; likewise.
        wanted: the model's names of `outputs`.
        reads: the tensors of `inputs`, each once.
        decoupled: each of its responses starts a level of its own.
        hands_on: another step reads an output; else they are the answer's alone.
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
    """The steps that some outputs need.

    Attributes:
        steps: each after those that write what it reads.
        level: of the answer: 0 where there is one, else it is given once for each response of
            the last decoupled step.
        outputs: the tensors that the answer waits for.
        missing: for each step, and the answer behind them, how many tensors it waits for when a
            request comes.
        first: the steps that wait for nothing.
        readers: tensor → the places of the steps that wait for it; `len(steps)` is the answer.
        given: the ensemble's inputs; one that is optional need not be there.
    """

    steps: tuple[PlannedStep, ...]
    level: int
    outputs: tuple[str, ...]
    missing: tuple[int, ...]
    first: tuple[PlannedStep, ...]
    readers: Mapping[str, tuple[int, ...]]
    given: frozenset[str]

    @property
    def answer(self) -> int:
        """The place of the answer."""
        return len(self.steps)

    def reads(self, place: int) -> tuple[str, ...]:
        return self.outputs if place == self.answer else self.steps[place].reads

    def level_of(self, place: int) -> int:
        return self.level if place == self.answer else self.steps[place].level


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
    """The steps that `outputs` need, in order, each with those of its outputs that are read."""
    needed = set(outputs)
    found = []
    for index, step in reversed(_in_order(config)):
        wanted = tuple(pair for pair in step.output_map.items() if pair[1] in needed)
        if wanted:
            needed.update(step.input_map.values())
            found.append((index, step, wanted))
    return found[::-1]


def _in_order(config: ModelConfig) -> list[tuple[int, EnsembleStep]]:
    """The steps so that each comes after those that write what it reads."""
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
