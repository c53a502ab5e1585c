"""TensorRT's own progress while it builds, from version 10 on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

from edge_server.backends.tensorrt.build.messages import Event, Progressed
from edge_server.backends.tensorrt.build.progress import PhaseTree

if TYPE_CHECKING:
    from collections.abc import Callable


def set_monitor(config: trt.IBuilderConfig, on_event: Callable[[Event], None]) -> Any:
    """Report progress to `on_event`; None before TensorRT 10.

    TensorRT does not own the monitor: hold the returned object until the plan is built.
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """TensorRT calls it on threads of its own, with the interpreter's lock held."""

        def __init__(self) -> None:
            super().__init__()
            self._phases = PhaseTree()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases.start(phase_name, parent_phase, num_steps)
            on_event(Progressed(self._phases.fraction, phase_name))

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._phases.step(phase_name, step)
            on_event(Progressed(self._phases.fraction, phase_name))
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._phases.finish(phase_name)

    monitor = Monitor()
    config.progress_monitor = monitor
    return monitor
