"""Progress of a build, from the nested phases that TensorRT reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Phase:
    parent: str
    steps: int
    done: int = 0


class PhaseTree:
    """Phases by name; a step of a phase may be a phase itself.

    A phase that starts again begins at 0, and its nested phases have ended.
    """

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._most = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self.finish(name)
        self._phases[name] = _Phase(parent if parent in self._phases else "", max(1, steps))

    def step(self, name: str, step: int) -> None:
        """Mark `step`, counted from 0, as done."""
        if name in self._phases:
            phase = self._phases[name]
            phase.done = min(max(phase.done, step + 1), phase.steps)

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)
        for child in [n for n, phase in self._phases.items() if phase.parent == name]:
            self.finish(child)

    @property
    def fraction(self) -> float:
        """Return the progress of the first phase, 0 to 1; it never goes back."""
        root = next((n for n, phase in self._phases.items() if not phase.parent), None)
        if root is not None:
            self._most = max(self._most, self._of(root))
        return self._most

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        inner = max((self._of(n) for n, p in self._phases.items() if p.parent == name), default=0.0)
        return min(1.0, (phase.done + inner) / phase.steps)
