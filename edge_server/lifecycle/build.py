"""Builds loaded, validated models from a spec, outside the registry."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from edge_server.backends import find_backend
from edge_server.backends.contract import LoadContext, no_progress
from edge_server.backends.server_context import STANDALONE
from edge_server.errors import EdgeServerError, ModelLoadError
from edge_server.gpu.devices import Devices
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure
from edge_server.lifecycle.model_validation import validate
from edge_server.lifecycle.reuse import Reuse, renewed, reuse
from edge_server.process.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import ProgressCallback
    from edge_server.backends.server_context import ServerContext
    from edge_server.inference.scheduling import Scheduling
    from edge_server.inference.snapshot import LoadedModel
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.model_spec import ModelSpec, Part

log = logging.getLogger(__name__)

T = TypeVar("T")

# Longer than the validation itself waits for the response of a model that no longer executes.
VALIDATION_TIMEOUT_S = 90.0


class Build:
    """Loads and validates models with their backends.

    Args:
        scheduling: the resources that the models' schedulers share.
        budget: checked before a model is loaded; None checks nothing.
        devices: the GPUs that models may use.
        server_context: the other resources of the daemon that models may use.
        timeout_s: the longest time, in seconds, for one request of a model's validation. A model
            that hangs is refused and left open: its thread cannot be ended, and the resources that
            it uses must not be closed.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        budget: MemoryBudget | None = None,
        devices: Devices | None = None,
        server_context: ServerContext = STANDALONE,
        *,
        timeout_s: float = VALIDATION_TIMEOUT_S,
    ) -> None:
        self._scheduling = scheduling
        self._budget = budget
        self._devices = devices or Devices()
        self._server_context = server_context
        self._timeout_s = timeout_s

    def model(
        self,
        model_spec: ModelSpec,
        serving: LoadedVersions | None = None,
        progress: ProgressCallback = no_progress,
    ) -> LoadedVersions | LoadFailure:
        """Load every version that `model_spec` selects, or return the failure and keep none open.

        Any exception of a backend becomes a failure of this model only.

        Args:
            model_spec: the spec of the model.
            serving: the serving versions; their unchanged parts are reused, see `reuse`.
            progress: receives the progress of the backend, which keeps the callback as long as the
                model lives.
        """
        began = time.monotonic()
        try:
            self._afford(model_spec, serving)
        except EdgeServerError as error:
            return LoadFailure(error, model_spec=model_spec)
        made: list[LoadedModel] = []
        kept: set[int] = set()
        for version in model_spec.versions:
            try:
                loaded = self._kept(model_spec, version, serving, progress)
                if loaded is not None:
                    kept.add(version)
                made.append(loaded or self._anew(model_spec, version, progress))
            # A backend may raise anything, and a model may call sys.exit().
            except (Exception, SystemExit) as error:  # noqa: BLE001
                LoadedVersions(model_spec, tuple(made)).close()
                return LoadFailure.of(error, model_spec.name, version, model_spec)
        return LoadedVersions(model_spec, tuple(made), time.monotonic() - began, frozenset(kept))

    def ensemble(self, part: Part) -> LoadedVersions:
        """Make every version of an ensemble that fits its members."""
        models = [self._scheduling.ensemble(c, version) for version, c in part.configs.items()]
        return LoadedVersions(part.model_spec, tuple(models))

    def _afford(self, model_spec: ModelSpec, serving: LoadedVersions | None) -> None:
        """Check the memory budget for the versions that cannot be reused.

        Raises:
            Unavailable: there is too little memory for them.
        """
        if self._budget is not None:
            made = [
                v for v in model_spec.versions if _reuse(model_spec, v, serving)[0] < Reuse.MODEL
            ]
            self._budget.check(model_spec, made)

    def _kept(
        self,
        model_spec: ModelSpec,
        version: int,
        serving: LoadedVersions | None,
        progress: ProgressCallback,
    ) -> LoadedModel | None:
        """Return the reused version, with new instances if they changed; None if not reusable."""
        what, like = _reuse(model_spec, version, serving)
        if like is None:
            return None
        if what is Reuse.STATISTICS:
            return self._anew(model_spec, version, progress, like.statistics)
        config = renewed(like.config, model_spec)
        if what is Reuse.INSTANCES:
            return like.shared(config)
        return self._scheduling.with_instances(like, config, model_spec.files.directory)

    def _anew(
        self,
        model_spec: ModelSpec,
        version: int,
        progress: ProgressCallback,
        statistics: ModelStatistics | None = None,
    ) -> LoadedModel:
        """Load and validate the version; the validation counts only in reused `statistics`."""
        loaded = self._version(model_spec, version, progress, statistics)
        try:
            run_with_timeout(
                f"validate-{model_spec.name}",
                partial(validate, loaded, model_spec.files.directory),
                self._timeout_s,
                late=loaded.close,
            )
        except Hangs as error:
            raise ModelLoadError(
                f"model '{model_spec.name}': its check before it serves: {error}; mend the model, "
                "or record a golden pair that it responds to"
            ) from error
        except BaseException:
            loaded.close()
            raise
        if statistics is None:
            loaded.statistics.start_over()
        return loaded

    def _version(
        self,
        model_spec: ModelSpec,
        version: int,
        progress: ProgressCallback,
        statistics: ModelStatistics | None,
    ) -> LoadedModel:
        began = time.monotonic()
        files = model_spec.files
        backend = find_backend(model_spec.config.backend)
        completed = backend.complete(files, version, model_spec.config)
        config = replace(completed, labels=model_spec.config.labels)
        context = LoadContext(
            files.versions[version], config, self._devices, progress, self._server_context
        )
        model = backend.load(context)
        try:
            loaded = self._scheduling.model(config, version, model, files.directory, statistics)
        except BaseException:
            model.close()
            raise
        loaded = replace(loaded, load_s=time.monotonic() - began)
        return replace(loaded, after_close=_holding(files.holder))


def _holding(held: object) -> Callable[[], None]:
    """Return a function that keeps `held` alive until the function is called."""

    def release() -> None:
        nonlocal held
        held = None

    return release


def _reuse(
    model_spec: ModelSpec, version: int, serving: LoadedVersions | None
) -> tuple[Reuse, LoadedModel | None]:
    """Return the reusable part of the version and its serving model, or NOTHING and None."""
    if serving is None:
        return Reuse.NOTHING, None
    like = next((model for model in serving.models if model.version == version), None)
    what = Reuse.NOTHING if like is None else reuse(model_spec, serving.model_spec, version)
    return what, like if what is not Reuse.NOTHING else None


class Hangs(ModelLoadError):
    """The work made no progress for too long; the resources that it holds are still in use."""


def run_with_timeout(
    name: str,
    work: Callable[[Callable[[], None]], T],
    timeout_s: float,
    *,
    late: Callable[[], None],
) -> T:
    """Run `work` on a thread of its own; return its result or raise its exception.

    Args:
        name: the name of the thread.
        work: receives a function to call at each sign of progress.
        timeout_s: the longest time between two signs of progress, in seconds.
        late: called on that thread if the work ends after the timeout.

    Raises:
        Hangs: the work made no progress in time. A thread cannot be ended, so the work keeps
            running with all resources that it holds.
        ModelLoadError: the system refuses a thread.
    """
    progress_s = time.monotonic()
    outcome: Future[T] = Future()

    def note_progress() -> None:
        nonlocal progress_s
        progress_s = time.monotonic()

    def run() -> None:
        result: T | None = None
        raised: BaseException | None = None
        try:
            result = work(note_progress)
        # The waiting caller raises it, even a SystemExit of a model.
        except BaseException as error:  # noqa: BLE001
            raised = error
        # False where the caller has given up.
        if outcome.set_running_or_notify_cancel():
            if raised is None:
                outcome.set_result(cast("T", result))
            else:
                outcome.set_exception(raised)
            return
        try:
            late()
        except Exception:
            log.exception("%s: ended after its timeout, and closing its model failed", name)

    if not start_thread(name, run):
        raise ModelLoadError("the system has no thread left for it")
    while (left_s := progress_s + timeout_s - time.monotonic()) > 0 or not outcome.cancel():
        if wait([outcome], max(0.0, left_s)).done:
            return outcome.result()
    raise Hangs(f"it hangs: no progress for {timeout_s:g} s")
