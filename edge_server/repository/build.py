"""From a draft to models that answer, beside the registry."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_server.backends import find_backend
from edge_server.backends.contract import Placement
from edge_server.errors import EdgeServerError, InternalError
from edge_server.repository.fit import Part

if TYPE_CHECKING:
    from edge_server.repository.draft import Draft
    from edge_server.serving.scheduling import Scheduling
    from edge_server.serving.snapshot import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a model could not be loaded.

    Attributes:
        error: what a person is told.
        version: the one that failed; 0 where it was none in particular.
        draft: None where it came to none.
    """

    error: EdgeServerError
    version: int = 0
    draft: Draft | None = None

    @staticmethod
    def of(
        error: BaseException, name: str, version: int = 0, draft: Draft | None = None
    ) -> Failure:
        """Whatever was raised while model `name` was loaded; what nobody foresaw is logged."""
        if isinstance(error, EdgeServerError):
            return Failure(error, version, draft)
        text = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
        log.error("model %s: loading failed", name, exc_info=error)
        return Failure(InternalError(text), version, draft)


@dataclass(frozen=True, eq=False)
class Built:
    """All versions of a model that its draft asks for, loaded, known to nobody yet.

    An ensemble's come to be when it is known to fit its members.
    """

    draft: Draft
    models: tuple[LoadedModel, ...] = ()
    took_s: float = 0.0

    def as_part(self) -> Part:
        """What ensembles see of it."""
        if self.draft.is_ensemble:
            return Part(self.draft, dict.fromkeys(self.draft.versions, self.draft.config))
        return Part(self.draft, {model.version: model.config for model in self.models})

    def close(self) -> None:
        """Where nobody wants it."""
        for model in self.models:
            try:
                model.close()
            except Exception:
                log.exception("model %s: closing version %d failed", model.name, model.version)


class Build:
    """Loads models of backends."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling

    def model(self, draft: Draft) -> Built | Failure:
        """Every version that `draft` asks for, or why one of them failed; then none is left open.

        Whatever a backend raises is this model's failure and nobody else's.
        """
        began = time.monotonic()
        made: list[LoadedModel] = []
        for version in draft.versions:
            try:
                made.append(self._version(draft, version))
            # A backend may raise anything, and a model may call sys.exit().
            except (Exception, SystemExit) as error:  # noqa: BLE001
                Built(draft, tuple(made)).close()
                return Failure.of(error, draft.name, version, draft)
        return Built(draft, tuple(made), time.monotonic() - began)

    def ensemble(self, part: Part) -> Built:
        """Every version of an ensemble that fits its members."""
        models = [self._scheduling.ensemble(c, version) for version, c in part.configs.items()]
        return Built(part.draft, tuple(models))

    def _version(self, draft: Draft, version: int) -> LoadedModel:
        began = time.monotonic()
        files = draft.files
        backend = find_backend(draft.config.backend)
        completed = backend.complete(files, version, draft.config)
        config = replace(completed, labels=draft.config.labels)
        model = backend.load(files.versions[version], config, Placement())
        try:
            loaded = self._scheduling.model(config, version, model, files.directory)
        except BaseException:
            model.close()
            raise
        loaded = replace(loaded, load_s=time.monotonic() - began)
        if draft.staged is None:
            return loaded
        draft.staged.hold()
        return replace(loaded, after_close=draft.staged.let_go)
