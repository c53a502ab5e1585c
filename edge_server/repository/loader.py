"""From files to models that answer: read, complete, validate, load, publish."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.backends import BACKENDS, find_backend
from edge_server.backends.contract import Placement
from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.ensemble_graph import resolve_graph
from edge_server.model_config.parse import read_model_config
from edge_server.model_config.validation import validate, without_effect
from edge_server.model_config.version_policy import select_versions
from edge_server.repository.load_order import circle_through, members_first
from edge_server.repository.scan import scan_repositories
from edge_server.serving.scheduling import Scheduling
from edge_server.serving.snapshot import ModelEntry, ModelState

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from edge_server.model_config.config import EnsembleStep
    from edge_server.model_config.files import ModelFiles
    from edge_server.serving.registry import ModelRegistry
    from edge_server.serving.snapshot import LoadedModel

log = logging.getLogger(__name__)


class RepositoryLoader:
    """Loads what the repositories hold into the registry.

    One model's fault is that model's: it becomes UNAVAILABLE with the reason, the others load.
    """

    def __init__(self, registry: ModelRegistry, repositories: Sequence[Path]) -> None:
        self._registry = registry
        self._scheduling = Scheduling()
        self._repositories = repositories

    def load_all(self, stop: threading.Event | None = None) -> list[ModelEntry]:
        """Load every model, members before the ensembles that use them.

        Args:
            stop: once it is set no further model is loaded; those not reached stay LOADING.

        Returns:
            The models that failed.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        found = scan_repositories(self._repositories)
        for name in found:
            self._registry.replace(name, [ModelEntry(name, 0, ModelState.LOADING)])
        read: dict[str, tuple[ModelFiles, Any]] = {}
        for name, files in found.items():
            with self._blaming(name):
                if isinstance(files, ModelConfigError):
                    raise files
                read[name] = (files, _read(files))
        for name in self._in_order(read):
            if stop is not None and stop.is_set():
                break
            with self._blaming(name):
                self._load(*read[name])
        return [
            entry
            for entry in self._registry.snapshot.entries.values()
            if entry.state is ModelState.UNAVAILABLE
        ]

    def _in_order(self, read: Mapping[str, tuple[ModelFiles, Any]]) -> list[str]:
        """Model names, members first; ensembles that depend on themselves fail here."""
        members = {
            name: [step.model_name for step in message.ensemble_scheduling.step]
            for name, (_, message) in read.items()
        }
        circles = {name: way for name in members if (way := circle_through(name, members))}
        for name, way in circles.items():
            files, _ = read[name]
            self._fail(
                name,
                f"{files.config_path}: circular dependency between ensembles: {' -> '.join(way)}",
            )
        return members_first({n: used for n, used in members.items() if n not in circles})

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Whatever goes wrong inside is that model's fault and nobody else's."""
        try:
            yield
        except EdgeServerError as error:
            self._fail(name, str(error))
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            reason = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
            self._fail(name, reason, trace=error)

    def _load(self, files: ModelFiles, message: Any) -> None:
        """Load the versions that the policy asks for and publish them together, or none."""
        started = time.monotonic()
        loaded = [
            self._load_version(files, message, version)
            for version in select_versions(message, files)
        ]
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
            config = resolve_graph(
                config, files.config_path, lambda step: self._find_member(files, step)
            )
            return self._scheduling.ensemble(config, version)
        backend = find_backend(config.backend)
        config = backend.complete(files, version, config)
        model = backend.load(files.versions[version], config, Placement())
        try:
            return self._scheduling.model(config, version, model, files.directory)
        except BaseException:
            model.close()
            raise

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

    def _fail(self, name: str, reason: str, trace: Exception | None = None) -> None:
        log.error("model %s: UNAVAILABLE: %s", name, reason, exc_info=trace)
        self._registry.replace(name, [ModelEntry(name, 0, ModelState.UNAVAILABLE, reason=reason)])


def _read(files: ModelFiles) -> Any:
    message = read_model_config(files.config_path)
    complete(message, files)
    validate(message, files, frozenset(BACKENDS))
    return message
