"""Model control: which models load at the start and on request; `poll` follows the files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from edge_server.errors import (
    AlreadyExists,
    EdgeServerError,
    InternalError,
    InvalidRequest,
    ModelConfigError,
    ModelLoadError,
    NotFound,
    SettingsError,
    Unavailable,
    Unsupported,
)
from edge_server.inference.data_plane import NOT_ALLOWED, PLAIN_LOAD, LoadOptions
from edge_server.inference.registry import ModelEntry, ModelState
from edge_server.lifecycle.model_spec import Override, StagedFiles
from edge_server.model_config.parse import parse_model_config_json
from edge_server.repository.content import PrivateDirectory
from edge_server.repository.scan import APPEARS_TWICE, is_model_name

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping

    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.lifecycle.model_spec import LoadFailure

log = logging.getLogger(__name__)

ALL = "*"

# Triton's status names in the reason of a failed load.
_STATUS = {
    InvalidRequest: "Invalid argument",
    ModelConfigError: "Invalid argument",
    ModelLoadError: "Invalid argument",
    NotFound: "Not found",
    Unavailable: "Unavailable",
    Unsupported: "Unsupported",
    AlreadyExists: "Already exists",
}


class RepositoryControl:
    """The `ModelControl` of Triton's modes NONE and EXPLICIT.

    Args:
        explicit: loads and unloads models on request; else all are loaded at the start and stay.
        load: the models to load at the start in mode EXPLICIT; `*` alone means all.
        exit_on_error: a model that fails to load at the start ends the daemon.
        private: the directory for files that clients send; closed with the control."""

    def __init__(
        self,
        loader: RepositoryLoader,
        *,
        explicit: bool = False,
        load: Collection[str] = (),
        exit_on_error: bool = True,
        private: PrivateDirectory | None = None,
    ) -> None:
        if ALL in load and len(load) > 1:
            raise SettingsError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        self._loader = loader
        self._explicit = explicit
        self._load_at_start = load
        self._exit_on_error = exit_on_error
        self._private = private or PrivateDirectory()

    def start(self, stop: threading.Event | None = None) -> None:
        """Load the models of the start; return early once `stop` is set. Where a repository cannot
        be read and `exit_on_error` is not set, the server is neither live nor ready, as in Triton,
        until a model is loaded on request. With `exit_on_error` raises ModelConfigError, or
        ModelLoadError where every failure may pass."""
        self._loader.take_over.start()
        try:
            with self._loader.until(stop):
                failed = self.load_first()
        except ModelConfigError as error:
            if self._exit_on_error:
                raise
            log.error("repository: %s; no model is loaded", error)  # noqa: TRY400 - its own text
            self._loader.table.registry.failed_start = True
            return
        if failed and self._exit_on_error:
            raise cannot_be_loaded(failed)

    def awaits(self, name: str) -> bool:
        """Return False: `start` has tried to load every model of the start."""
        del name
        return False

    def load_first(self) -> list[ModelEntry]:
        """Load the models of the start, and return the entries of the models that failed."""
        if self._explicit and ALL not in self._load_at_start:
            return self._loader.load_named(self._load_at_start)
        return self._loader.load_all()

    @property
    def loads_on_request(self) -> bool:
        return self._explicit

    def load(self, name: str, options: LoadOptions = PLAIN_LOAD) -> None:
        self._require_explicit()
        name = name.strip()
        if not name:
            raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.")
        if name == ".." or "/" in name:
            raise InvalidRequest(
                f"invalid model name '{name}', model name must not contain path traversal "
                "characters"
            )
        if not is_model_name(name):
            raise _not_polled(name)
        override = self._override(name, options)
        staged = None if override is None else override.staged
        failures: Mapping[str, LoadFailure] | None = None
        try:
            failures = self._loader.load(
                name, override, within=options.within, cancellation=options.cancellation
            )
        except NotFound as error:
            raise _not_polled(name) from error
        finally:
            # A loaded model holds the files that it needs.
            if staged is not None and (failures is None or name in failures):
                staged.remove()
        if failures:
            raise _load_error(name, failures)
        if why := self._loader.idle.wake(name):
            raise Unavailable(why)
        self._loader.table.registry.failed_start = False

    def unload_idle(self, now: float) -> None:
        self._loader.idle.unload_idle(now)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        self._require_explicit()
        self._loader.lifecycle.unload(name.strip(), with_members=unload_dependents)

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """See `ModelControl.index`; in mode EXPLICIT the index also lists the models on disk."""
        entries = self._loader.table.registry.snapshot.index(only_ready=only_ready)
        if self._explicit and not only_ready:
            known = {entry.name for entry in entries}
            on_disk = self._loader.source.names()
            entries += [_never_loaded(n, places) for n, places in on_disk.items() if n not in known]
            entries.sort(key=lambda entry: (entry.name, entry.version))
        return entries

    def close(self, timeout_s: float) -> None:
        """Clear the registry; wait up to `timeout_s` for models that close or load."""
        self._loader.close(timeout_s)
        self._private.close()

    def _override(self, name: str, options: LoadOptions) -> Override | None:
        if options.config is None:
            if options.files:
                text = "Load parameter 'config' must be specified for model file override"
                raise _not_polled(name, text)
            return None
        try:
            message = parse_model_config_json(options.config, name)
        except InvalidRequest as error:
            raise _not_polled(name, str(error)) from error
        if not options.files:
            return Override(message)
        try:
            return Override(message, StagedFiles(self._private.path(), name, options.files))
        except OSError as error:
            raise InternalError(
                f"file parameters cannot be kept: {error}; name another directory in TMPDIR"
            ) from error

    def _require_explicit(self) -> None:
        if not self._explicit:
            raise Unavailable(NOT_ALLOWED)


def cannot_be_loaded(failed: Collection[ModelEntry]) -> ModelConfigError:
    """Return the error that ends the daemon when these models fail to load.
    Returns: ModelLoadError if every failure may pass, otherwise ModelConfigError."""
    kind = ModelLoadError if all(entry.may_pass for entry in failed) else ModelConfigError
    names = ", ".join(sorted({entry.name for entry in failed}))
    return kind(f"models that cannot be loaded: {names}")


def _never_loaded(name: str, places: int) -> ModelEntry:
    if places > 1:
        return ModelEntry(name, 0, ModelState.UNAVAILABLE, APPEARS_TWICE)
    return ModelEntry(name, 0, ModelState.UNKNOWN)


def _not_polled(name: str, reason: str = "") -> InternalError:
    text = f"failed to load '{name}', failed to poll from model repository"
    return InternalError(f"{text}: {reason}" if reason else text)


def _load_error(name: str, failures: Mapping[str, LoadFailure]) -> EdgeServerError:
    """Return the error for the caller: one line per failed model, `name` first."""
    mine = failures.get(name)
    if mine is not None and mine.model_spec is None:
        return _not_polled(name, str(mine.error))
    lines = sorted(failures.items(), key=lambda item: (item[0] != name, item[0]))
    return ModelConfigError("".join(_line(model, failure) for model, failure in lines))


def _line(name: str, failure: LoadFailure) -> str:
    text = f"load failed for model '{name}': "
    if failure.model_spec is not None:
        version = failure.version or failure.model_spec.versions[-1]
        text += f"version {version} is at UNAVAILABLE state: "
    kinds = type(failure.error).__mro__
    status = next((_STATUS[kind] for kind in kinds if kind in _STATUS), "Internal")
    error = str(failure.error)
    if failure.model_spec is not None:
        error = failure.model_spec.files.as_shown(error)
    return f"{text}{status}: {error};\n"
