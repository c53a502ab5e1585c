"""Progress of a plan's build, in the log and on the model's index entry."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.build.messages import Progressed, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import ProgressCallback
    from edge_server.backends.tensorrt.build.messages import Event

log = logging.getLogger(__name__)

_LOGGED_EVERY = 0.1
_REPORT_EVERY_S = 1.0
_STEP_PERCENT = 5
# TensorRT's phase names may list many layers.
_LONGEST_PHASE = 80


class BuildProgress:
    """Reports each step of a build, and its progress: in the log, and by `on_progress`.

    The log gets a line per tenth of the build; `on_progress` a text per twentieth, and a changed
    phase at most once a second. The end of the `with` block reports the empty text.

    Args:
        plan: the name of the plan's file.
        tensorrt: the version that builds the plan.
        now: monotonic, s.
    """

    def __init__(
        self,
        model: str,
        plan: str,
        tensorrt: str,
        on_progress: ProgressCallback,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._what = f"{plan} with TensorRT {'.'.join(tensorrt.split('.')[:2])}"
        self._on_progress = on_progress
        self._now = now
        self._logged_next = 0.0
        self._step = -1
        self._reported_at_s = 0.0
        self._text = ""

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            self._on_progress("")

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            log.info("model %s: plan: %s", self._model, event.what)
            self._report(f"{self._what}: {event.what}")
        elif isinstance(event, Progressed):
            if event.fraction >= self._logged_next:
                log.info("model %s: plan: %.0f %% built", self._model, 100 * event.fraction)
                self._logged_next = event.fraction + _LOGGED_EVERY
            self._progressed(event)

    def _progressed(self, event: Progressed) -> None:
        percent = round(100 * event.fraction)
        phase = event.phase[:_LONGEST_PHASE]
        text = f"building {self._what}: {percent} % ({phase})"
        step = percent // _STEP_PERCENT
        is_due = step > self._step or self._now() - self._reported_at_s >= _REPORT_EVERY_S
        if is_due and text != self._text:
            self._step = step
            self._report(text)

    def _report(self, text: str) -> None:
        self._text, self._reported_at_s = text, self._now()
        self._on_progress(text)
