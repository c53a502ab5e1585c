"""Model control: which models load at the start, on request, and after a change of the files."""

from __future__ import annotations

import logging
import math
import threading
import time
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
from edge_server.lifecycle.updates import Updates
from edge_server.model_config.parse import parse_model_config_json
from edge_server.process.threads import Worker
from edge_server.repository.change_detector import ChangeDetector, InotifyWatch
from edge_server.repository.content import PrivateDirectory
from edge_server.repository.scan import APPEARS_TWICE, Repositories, is_model_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from edge_server.lifecycle.loader import RepositoryLoader
    from edge_server.lifecycle.model_spec import LoadFailure
    from edge_server.lifecycle.records import Deployments

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
_FIRST_SCANS_S = 0.2
# The number of scans that a slow disk gets at the first start, however long they take.
_FIRST_SCANS = 5
# The scan interval while a model is changing, so that the wait for the next poll does not add to
# the settling time.
_SETTLING_S = 0.5


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
            failed = self.load_first(stop)
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

    def load_first(self, stop: threading.Event | None = None) -> list[ModelEntry]:
        """Load the models of the start, and return the entries of the models that failed."""
        if self._explicit and ALL not in self._load_at_start:
            return self._loader.load_named(self._load_at_start, stop)
        return self._loader.load_all(stop)

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
        try:
            failures = self._load(name, override, options)
        except NotFound as error:
            raise _not_polled(name) from error
        if failures:
            raise _load_error(name, failures)
        if why := self._loader.idle.wake(name):
            raise Unavailable(why)
        self._loader.table.registry.failed_start = False

    def unload_idle(self, now: float) -> None:
        """See `IdleModels.look`."""
        self._loader.idle.look(now)

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

    def _load(
        self, name: str, override: Override | None, options: LoadOptions
    ) -> Mapping[str, LoadFailure]:
        failures: Mapping[str, LoadFailure] | None = None
        try:
            failures = self._loader.load(
                name, override, within=options.within, cancellation=options.cancellation
            )
            return failures
        finally:
            # A loaded model holds the files that it needs.
            if (
                override is not None
                and override.staged is not None
                and (failures is None or name in failures)
            ):
                override.staged.remove()

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
    status = _STATUS.get(type(failure.error), "Internal")
    error = str(failure.error)
    if failure.model_spec is not None:
        error = failure.model_spec.files.as_shown(error)
    return f"{text}{status}: {error};\n"


class PollControl(RepositoryControl):
    """The control of mode POLL: follows the repositories, and refuses requests as NONE. It scans
    every `poll_s` seconds, more often while a model is changing; inotify only makes a scan start
    earlier.

    Args:
        poll_s: 0 scans until the models of the start are complete, and never again.
        settle_s: for how long a model's files must be unchanged.
        exit_on_error: a model that fails to load before any model has served ends the daemon."""

    def __init__(
        self,
        loader: RepositoryLoader,
        deployments: Deployments,
        repositories: Sequence[Path],
        *,
        poll_s: float,
        settle_s: float,
        exit_on_error: bool = True,
    ) -> None:
        super().__init__(loader, exit_on_error=exit_on_error)
        # No deadline: a disk that hangs must not end the process, as the loaded models still serve.
        self.worker = Worker("repository", self._tick, deadline_s=math.inf)
        self.updates = Updates(loader, deployments)
        self.deployments = deployments
        self._repositories = tuple(repositories)
        self._poll_s = poll_s or math.inf
        # Enough for every complete model, and for one whose last file was just written.
        self._first_timeout_s = 2 * settle_s + 1.0
        # Used by `start`, then by the worker alone.
        self._change_detector = ChangeDetector(self._repositories, settle_s)
        self._inotify_watch = InotifyWatch(repositories)
        self._scanned_s = time.monotonic()
        self._next_s = 0.0
        self._arrived: set[str] = set()
        self._kept: frozenset[str] = frozenset()

    def start(self, stop: threading.Event | None = None) -> None:
        """Load the last known good models; without any, load the models of the repositories, but
        for those whose files keep changing. Raises ModelConfigError where no model has served yet,
        and one fails to load or a repository cannot be read."""
        self._loader.take_over.start()
        if not self.load_last_good(stop):
            self._load_first(stop or threading.Event())
        self.worker.start()

    def load_last_good(self, stop: threading.Event | None) -> bool:
        """Load the last known good copies of an earlier run; return whether there were any."""
        kept = self.updates.load_last_good(stop)
        self._kept = frozenset(kept)
        self._change_detector.resume({name: copy.source for name, copy in kept.items()})
        return bool(kept)

    def awaits(self, name: str) -> bool:
        """Return whether the first scan may still load `name`: the start has loaded last known good
        copies, and had none of this model or of a member, which the repositories hold."""
        if not self._kept:
            return False
        with self.deployments.lock:
            specs = self.deployments.get(name).specs
            needed = {name, *(member for spec in specs for member in self.deployments.below(spec))}
        lacking = needed - self._kept
        try:
            return bool(lacking) and lacking <= Repositories(self._repositories).names().keys()
        except ModelConfigError:
            return True  # not mounted yet: the model may be there

    def scan(self, now: float, arrived: Collection[str] = ()) -> bool:
        """Scan the repositories once and start the updates; return whether a model may still be
        changing.
        """
        changes = self._change_detector.scan(now, arrived)
        self._change_detector.report_again(self.updates.carry_out(changes))
        self._scanned_s = time.monotonic()
        return bool(self._change_detector.changing)

    def poll_age_s(self, now: float) -> float:
        """Return the age of the last scan in seconds, at `now` (`time.monotonic()`)."""
        return now - self._scanned_s

    def close(self, timeout_s: float) -> None:
        """Stop the scans and clear the registry; wait up to `timeout_s` for models that close or
        load."""
        until = time.monotonic() + timeout_s
        # A disk that hangs may block the scan; the models need part of the time, too.
        self.worker.stop(timeout_s / 2)
        self.updates.close()
        super().close(max(0.0, until - time.monotonic()))
        self._inotify_watch.close()
        self.deployments.store.close()

    def _tick(self, now: float) -> None:
        """Called about every second."""
        self.deployments.commit()
        # What the store could not copy, or was released from quarantine, is staged again.
        if again := self.deployments.release_noted() | self.updates.retry(now):
            self._change_detector.report_again(again)
            self._next_s = 0.0
        if now >= self._next_s:
            changing = self.scan(now, self._arrived)
            self._arrived = set()
            self._next_s = now + min(self._poll_s, _SETTLING_S if changing else self._poll_s)
        arrived = self._inotify_watch.wait(max(0.0, min(1.0, self._next_s - time.monotonic())))
        if arrived is not None and self._poll_s < math.inf:
            self._arrived.update(arrived)
            self._next_s = 0.0

    def _load_first(self, stop: threading.Event) -> None:
        scans, until = 0, math.inf
        while self.scan(time.monotonic()):
            scans += 1
            until = min(until, time.monotonic() + self._first_timeout_s)
            if scans > _FIRST_SCANS and time.monotonic() > until:
                for name in self._change_detector.changing:
                    log.warning(
                        "model %s: its files keep changing; the start goes on without it, and it "
                        "is loaded once they stay as they are",
                        name,
                    )
                break
            if stop.wait(_FIRST_SCANS_S):
                return
        try:
            Repositories(self._repositories).names()  # raises, as in the other modes
        except ModelConfigError:
            if self._exit_on_error:
                raise
        while not self.updates.wait_idle(_FIRST_SCANS_S):
            if stop.is_set():
                return
        # As in the other modes, a directory that cannot be a model does not end the daemon.
        failed = [
            entry
            for entry in self.deployments.registry.snapshot.entries.values()
            if entry.state is ModelState.UNAVAILABLE and is_model_name(entry.name)
        ]
        if failed and self._exit_on_error:
            raise cannot_be_loaded(failed)
