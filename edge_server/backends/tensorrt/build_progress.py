"""What is told of a plan that is being built."""

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
_TOLD_EVERY_S = 1.0
_STEP_PERCENT = 5
# TensorRT's own words, which may name many layers.
_LONGEST_PHASE = 80


class BuildProgress:
    """Tells each step of a build, and its progress: in the log, and by `tell`.

    The log hears each tenth of the way; `tell` each twentieth, and what changes between at most
    every second. After the `with` it has nothing to tell any more.

    Args:
        plan: the file that is wanted.
        tensorrt: the version that builds it.
        now: monotonic, s.
    """

    def __init__(
        self,
        model: str,
        plan: str,
        tensorrt: str,
        tell: ProgressCallback,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._what = f"{plan} with TensorRT {'.'.join(tensorrt.split('.')[:2])}"
        self._tell = tell
        self._now = now
        self._logged_next = 0.0
        self._step = -1
        self._told_at = 0.0
        self._text = ""

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            self._tell("")

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            log.info("model %s: plan: %s", self._model, event.what)
            self._say(f"{self._what}: {event.what}")
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
        is_due = step > self._step or self._now() - self._told_at >= _TOLD_EVERY_S
        if is_due and text != self._text:
            self._step = step
            self._say(text)

    def _say(self, text: str) -> None:
        self._text, self._told_at = text, self._now()
        self._tell(text)
