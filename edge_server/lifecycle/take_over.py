"""Takes a preferred configuration into service once it can be loaded, in place of what stands in.

For the lane model: the ONNX file serves on the CPU until its plan is built (docs/tensorrt.md).
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, Unavailable, may_pass
from edge_server.lifecycle.model_spec import LoadFailure
from edge_server.process.threads import Backoff, GivenUp, start_thread, while_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from edge_server.lifecycle.lifecycle import ModelLifecycle
    from edge_server.lifecycle.model_spec import ModelSpec

log = logging.getLogger(__name__)

# Between two attempts: a plan may have been built by `edge-server plan refresh`, or memory is free.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class TakeOver:
    """Prepares what serving stand-ins stand in for, on a thread of each, and loads it.

    The build holds no lock, so that changes of the model go on; the load that follows is an
    ordinary one, with its validation and its canary.

    Args:
        hold: locks the models of these names against other loads.
    """

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        hold: Callable[[Collection[str]], AbstractContextManager[None]],
    ) -> None:
        self._lifecycle = lifecycle
        self._hold = hold
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        # The models that have a thread.
        self._working: set[str] = set()

    def start(self) -> None:
        """Let `watch` begin to work."""
        self._started = True

    def end(self) -> None:
        self._over.set()

    def watch(self, names: Collection[str]) -> None:
        """Take care of those models of `names` that a stand-in serves."""
        for name in names if self._started else ():
            spec = self._lifecycle.table.serves(name)
            if spec is None or spec.instead_of is None:
                continue
            with self._lock:
                if name not in self._working:
                    work = partial(self._work, name)
                    if start_thread(f"take-over-{name}", work):
                        self._working.add(name)

    def _work(self, name: str) -> None:
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        stays: ModelSpec | None = None
        while True:
            with self._lock:
                spec = self._lifecycle.table.serves(name)
                head = None if spec is None or spec is stays else spec.instead_of
                if spec is None or head is None or self._over.is_set():
                    self._working.discard(name)
                    return
            try:
                if not self._try_all(spec, head):
                    stays = spec
            except Unavailable:
                log.debug("model %s: nothing takes over: the server ends", name)
            if spec is not stays:
                self._over.wait(pauses.next_s())

    def _try_all(self, stand_in: ModelSpec, head: ModelSpec) -> bool:
        """Try each configuration before `stand_in`; return whether to try them again later."""
        tried, again = head, False
        while tried.files.config_name != stand_in.files.config_name:
            failure = self._try(stand_in, tried)
            if failure is None:
                # What took over may be a stand-in itself.
                return True
            if isinstance(failure.error, GivenUp):
                return True
            # A plan that cannot be built may be built by hand; one that fails its tests stays so.
            again = again or not failure.version or may_pass(failure.error)
            tried = tried.standing_in(head, failure.reason)
        if self._lifecycle.report_shortfall(stand_in, tried.why):
            log.warning("model %s: degraded: %s", stand_in.name, tried.why)
        return again

    def _try(self, stand_in: ModelSpec, preferred: ModelSpec) -> LoadFailure | None:
        """Prepare and load `preferred`; return the failure."""
        name, config = stand_in.name, preferred.files.config_name
        lifecycle = self._lifecycle

        def progress(text: str) -> None:
            if text:
                step = text.removeprefix("building ")
                lifecycle.report_shortfall(stand_in, f"{config}: plan building: {step}")

        def why_unwanted() -> str:
            is_wanted = lifecycle.serves(stand_in) and not self._over.is_set()
            return "" if is_wanted else f"model '{name}': what it is prepared for is not served"

        if reason := lifecycle.outcomes.why_not(preferred):
            return LoadFailure(ModelConfigError(reason), model_spec=preferred)
        try:
            with while_wanted(why_unwanted):
                lifecycle.build.prepare(preferred, progress)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            return LoadFailure.of(error, name, model_spec=preferred)
        with self._hold([name]):
            if not lifecycle.begin_take_over(stand_in, preferred):
                return LoadFailure(GivenUp(why_unwanted() or f"model '{name}': loads now"))
            with while_wanted(why_unwanted), lifecycle.outcomes.loading(preferred):
                serving = lifecycle.table.serving(name)
                built = lifecycle.build.model(preferred, serving, progress, builds=False)
            if isinstance(built, LoadFailure):
                lifecycle.fall_back(preferred, None)
                return built
            return lifecycle.publish({name: built}).get(name)
