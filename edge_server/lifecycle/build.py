"""From a draft to models that answer, beside the registry."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from edge_server.backends import find_backend
from edge_server.backends.contract import no_progress
from edge_server.backends.server_context import STANDALONE
from edge_server.errors import EdgeServerError, InternalError, ModelLoadError
from edge_server.gpu.devices import Devices
from edge_server.lifecycle.fit import Part
from edge_server.lifecycle.model_validation import prove
from edge_server.lifecycle.reuse import Reuse, renewed, reuse
from edge_server.lifecycle.timeouts import Hangs, run_with_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.contract import ProgressCallback
    from edge_server.backends.server_context import ServerContext
    from edge_server.inference.scheduling import Scheduling
    from edge_server.inference.snapshot import LoadedModel
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.model_spec import ModelSpec

log = logging.getLogger(__name__)

# More than the proof itself gives a model that does nothing any more and has not answered.
PROOF_PATIENCE_S = 90.0


@dataclass(frozen=True)
class LoadFailure:
    """Why a model could not be loaded.

    Attributes:
        error: what a person is told.
        version: the one that failed; 0 where it was none in particular.
        draft: None where it came to none.
        misfit: it was loaded, but does not fit the ensembles beside it.
    """

    error: EdgeServerError
    version: int = 0
    model_spec: ModelSpec | None = None
    misfit: bool = False

    @staticmethod
    def of(
        error: BaseException, name: str, version: int = 0, model_spec: ModelSpec | None = None
    ) -> LoadFailure:
        """Whatever was raised while model `name` was loaded; what nobody foresaw is logged."""
        if isinstance(error, EdgeServerError):
            return LoadFailure(error, version, model_spec)
        text = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
        log.error("model %s: loading failed", name, exc_info=error)
        return LoadFailure(InternalError(text), version, model_spec)


@dataclass(frozen=True, eq=False)
class LoadedVersions:
    """All versions of a model that its draft asks for, loaded, known to nobody yet.

    An ensemble's come to be when it is known to fit its members.

    Attributes:
        kept: the versions that are the same as before, but perhaps for their instances.
    """

    model_spec: ModelSpec
    models: tuple[LoadedModel, ...] = ()
    took_s: float = 0.0
    kept: frozenset[int] = frozenset()

    def as_part(self) -> Part:
        """What ensembles see of it."""
        if self.model_spec.is_ensemble:
            return Part(
                self.model_spec, dict.fromkeys(self.model_spec.versions, self.model_spec.config)
            )
        return Part(self.model_spec, {model.version: model.config for model in self.models})

    def close(self) -> None:
        """Where nobody wants it."""
        for model in self.models:
            try:
                model.close()
            except Exception:
                log.exception("model %s: closing version %d failed", model.name, model.version)


class Build:
    """Loads models of backends.

    Args:
        budget: is asked before a model is loaded; None lets all load.
        devices: the GPUs that models may use.
        surroundings: what else they may use.
        patience_s: how long a request of a model's proof may take. One that hangs is refused, and
            left as it is: its thread cannot be ended, and what it uses must not be closed.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        budget: MemoryBudget | None = None,
        devices: Devices | None = None,
        server_context: ServerContext = STANDALONE,
        *,
        patience_s: float = PROOF_PATIENCE_S,
    ) -> None:
        self._scheduling = scheduling
        self._budget = budget
        self._devices = devices or Devices()
        self._server_context = server_context
        self._patience_s = patience_s

    def model(
        self,
        model_spec: ModelSpec,
        serving: LoadedVersions | None = None,
        tell: ProgressCallback = no_progress,
    ) -> LoadedVersions | LoadFailure:
        """Every version that `draft` asks for, or why one of them failed; then none is left open.

        Whatever a backend raises is this model's failure and nobody else's.

        Args:
            serving: what serves now; what has not changed of it is used on, see `reuse`.
            tell: hears what the backend is at; it keeps it as long as the model lives.
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
                loaded = self._kept(model_spec, version, serving, tell)
                if loaded is not None:
                    kept.add(version)
                made.append(loaded or self._anew(model_spec, version, tell))
            # A backend may raise anything, and a model may call sys.exit().
            except (Exception, SystemExit) as error:  # noqa: BLE001
                LoadedVersions(model_spec, tuple(made)).close()
                return LoadFailure.of(error, model_spec.name, version, model_spec)
        return LoadedVersions(model_spec, tuple(made), time.monotonic() - began, frozenset(kept))

    def ensemble(self, part: Part) -> LoadedVersions:
        """Every version of an ensemble that fits its members."""
        models = [self._scheduling.ensemble(c, version) for version, c in part.configs.items()]
        return LoadedVersions(part.model_spec, tuple(models))

    def _afford(self, model_spec: ModelSpec, serving: LoadedVersions | None) -> None:
        """Raises: Unavailable: there is no memory for the models that are to be made."""
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
        tell: ProgressCallback,
    ) -> LoadedModel | None:
        """The version as it serves, with other instances where others are wanted."""
        what, like = _reuse(model_spec, version, serving)
        if like is None:
            return None
        if what is Reuse.STATISTICS:
            return self._anew(model_spec, version, tell, like.statistics)
        config = renewed(like.config, model_spec)
        if what is Reuse.INSTANCES:
            return like.shared(config)
        return self._scheduling.with_instances(like, config, model_spec.files.directory)

    def _anew(
        self,
        model_spec: ModelSpec,
        version: int,
        tell: ProgressCallback,
        statistics: ModelStatistics | None = None,
    ) -> LoadedModel:
        """The version, loaded and proven; the proof counts only in statistics that go on."""
        loaded = self._version(model_spec, version, tell, statistics)
        try:
            run_with_timeout(
                f"prove-{model_spec.name}",
                partial(prove, loaded, model_spec.files.directory),
                self._patience_s,
                late=loaded.close,
            )
        except Hangs as error:
            raise ModelLoadError(
                f"model '{model_spec.name}': its check before it serves: {error}; mend the model, "
                "or record a golden pair that it answers"
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
        tell: ProgressCallback,
        statistics: ModelStatistics | None,
    ) -> LoadedModel:
        began = time.monotonic()
        files = model_spec.files
        backend = find_backend(model_spec.config.backend)
        completed = backend.complete(files, version, model_spec.config)
        config = replace(completed, labels=model_spec.config.labels)
        model = backend.load(
            files.versions[version], config, self._devices, tell, self._server_context
        )
        try:
            loaded = self._scheduling.model(config, version, model, files.directory, statistics)
        except BaseException:
            model.close()
            raise
        loaded = replace(loaded, load_s=time.monotonic() - began)
        if model_spec.staged is not None:
            model_spec.staged.hold()
            return replace(loaded, after_close=model_spec.staged.let_go)
        return replace(loaded, after_close=_holding(files.holder))


def _holding(held: object) -> Callable[[], None]:
    """Keeps `held` until it is called."""

    def let_go() -> None:
        nonlocal held
        held = None

    return let_go


def _reuse(
    model_spec: ModelSpec, version: int, serving: LoadedVersions | None
) -> tuple[Reuse, LoadedModel | None]:
    """What of the version is used on, and the one that it is of; None where it is nothing."""
    if serving is None:
        return Reuse.NOTHING, None
    like = next((model for model in serving.models if model.version == version), None)
    what = Reuse.NOTHING if like is None else reuse(model_spec, serving.model_spec, version)
    return what, like if what is not Reuse.NOTHING else None
