"""From files to models that answer: read, complete, validate, load, publish."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from edge_server.backends import BACKENDS, find_backend
from edge_server.backends.contract import Placement
from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.ensemble_graph import validate_graph
from edge_server.model_config.parse import read_model_config
from edge_server.model_config.validation import validate, without_effect
from edge_server.model_config.version_policy import select_versions
from edge_server.repository.scan import scan_repositories
from edge_server.serving.ensemble import EnsembleScheduler
from edge_server.serving.scheduler import DirectScheduler
from edge_server.serving.snapshot import LoadedModel, ModelEntry, ModelState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from edge_server.model_config.config import EnsembleStep
    from edge_server.model_config.files import ModelFiles
    from edge_server.serving.registry import ModelRegistry

log = logging.getLogger(__name__)

_KNOWN_BACKENDS = frozenset(BACKENDS)


class RepositoryLoader:
    """Loads what the repositories hold into the registry.

    One model's fault is that model's: it becomes UNAVAILABLE with the reason, the others load.
    """

    def __init__(self, registry: ModelRegistry, repositories: Sequence[Path]) -> None:
        self._registry = registry
        self._repositories = repositories

    def load_all(self) -> list[ModelEntry]:
        """Load every model, members before the ensembles that use them; those that failed.

        Raises:
            ModelConfigError: a repository itself cannot be used.
        """
        messages: dict[str, tuple[ModelFiles, Any]] = {}
        for name, files in scan_repositories(self._repositories).items():
            self._registry.replace(name, [ModelEntry(name, 0, ModelState.LOADING)])
            try:
                messages[name] = (files, _read(files))
            except ModelConfigError as error:
                self._fail(name, error)
        for name in _members_first({name: message for name, (_, message) in messages.items()}):
            self._load(*messages[name])
        return [
            entry
            for entry in self._registry.snapshot.entries.values()
            if entry.state is ModelState.UNAVAILABLE
        ]

    def _load(self, files: ModelFiles, message: Any) -> None:
        """Load the versions that the policy asks for and publish them together, or none."""
        started = time.monotonic()
        try:
            loaded = [
                self._load_version(files, message, version)
                for version in select_versions(message, files)
            ]
        except ModelConfigError as error:
            self._fail(files.name, error)
            return
        self._registry.replace(
            files.name,
            [ModelEntry(m.config.name, m.version, ModelState.READY, loaded=m) for m in loaded],
        )
        for field, reason in without_effect(message).items():
            log.warning("model %s: field '%s' has no effect here: %s", files.name, field, reason)
        log.info(
            "model %s: READY, version %s, %.0f ms",
            files.name,
            ", ".join(str(m.version) for m in loaded),
            1e3 * (time.monotonic() - started),
        )

    def _load_version(self, files: ModelFiles, message: Any, version: int) -> LoadedModel:
        config = ModelConfig.of(message)
        if config.is_ensemble:
            validate_graph(config, files.config_path, lambda step: self._find_member(files, step))
            return LoadedModel(config, version, EnsembleScheduler(config, version))
        backend = find_backend(config.backend)
        config = backend.complete(files, version, config)
        model = backend.load(files.versions[version], config, Placement())
        return LoadedModel(config, version, DirectScheduler(config, version, model))

    def _find_member(self, files: ModelFiles, step: EnsembleStep) -> ModelConfig:
        ensemble, member = files.name, step.model_name
        snapshot = self._registry.snapshot
        entries = {v: e for (name, v), e in snapshot.entries.items() if name == member}
        if not entries:
            raise ModelConfigError(
                f"{files.config_path}: ensemble {ensemble} contains models that are not "
                f"available or ambiguous: {member}"
            )
        if step.model_version == -1:
            ready = snapshot.ready_versions(member)
            if ready:
                return snapshot.find(member).config
            reason = next(iter(entries.values())).reason
            raise ModelConfigError(
                f"{files.config_path}: ensemble '{ensemble}' depends on '{member}' which has no "
                f"loaded version. Model '{member}' loading failed with error: {reason}"
            )
        entry = entries.get(step.model_version)
        if entry is None or entry.loaded is None:
            raise ModelConfigError(
                f"{files.config_path}: ensemble '{ensemble}' depends on '{member}' whose required "
                f"version {step.model_version} is not loaded."
            )
        return entry.loaded.config

    def _fail(self, name: str, error: ModelConfigError) -> None:
        log.error("model %s: UNAVAILABLE: %s", name, error)
        self._registry.replace(
            name, [ModelEntry(name, 0, ModelState.UNAVAILABLE, reason=str(error))]
        )


def _read(files: ModelFiles) -> Any:
    message = read_model_config(files.config_path)
    complete(message, files)
    validate(message, files, _KNOWN_BACKENDS)
    return message


def _members_first(messages: dict[str, Any]) -> list[str]:
    """Model names so that an ensemble comes after its members; a circle's own come last."""
    ordered: list[str] = []
    waiting = dict(messages)
    while waiting:
        ready = [
            name
            for name, message in waiting.items()
            if not any(s.model_name in waiting for s in message.ensemble_scheduling.step)
        ]
        # In a circle nothing is ready: take them all, each will miss a member and say so.
        for name in ready or list(waiting):
            ordered.append(name)
            del waiting[name]
    return ordered
