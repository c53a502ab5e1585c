"""The repository loader: reads models, builds them outside the registry, publishes them; and takes
a preferred configuration into service once it can be loaded, in place of what stands in: for the
lane model, the ONNX file serves on the CPU until its plan is built (docs/tensorrt.md)."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import Cancelled, ModelConfigError, NotFound, Unavailable, may_pass
from edge_server.inference.registry import ModelState
from edge_server.lifecycle.build import ModelLoad
from edge_server.lifecycle.idle import IdleModels
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec, StagedFiles
from edge_server.model_config.config import USUAL_COMPLETION
from edge_server.model_config.files import ModelFiles
from edge_server.process.threads import Backoff, GivenUp, run_parallel, start_thread, while_wanted
from edge_server.repository.content import manifest_and_signature
from edge_server.repository.scan import NAME_RULE, files_in, is_model_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    from edge_server.inference.registry import ModelEntry
    from edge_server.lifecycle.lifecycle import ModelLifecycle
    from edge_server.lifecycle.model_spec import Override
    from edge_server.model_config.config import Completion
    from edge_server.repository.manifest import SignaturePolicy
    from edge_server.requests import Cancellation

    Found = dict[str, ModelSpec | LoadFailure]

log = logging.getLogger(__name__)

# Between two attempts: a plan may have been built by `edge-server plan refresh`, or memory is free.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class TakeOver:
    """Prepares what serving stand-ins stand in for, on a thread of each, and loads it. The build
    holds no lock, so that changes of the model go on; the load that follows is an ordinary one,
    with its validation and its canary, for which `hold` locks the model."""

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
            spec = self._lifecycle.table.serving_spec(name)
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
                spec = self._lifecycle.table.serving_spec(name)
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
        name, config = stand_in.name, preferred.files.config_name
        lifecycle = self._lifecycle

        def progress(text: str) -> None:
            if text:
                step = text.removeprefix("building ")
                lifecycle.report_shortfall(stand_in, f"{config}: plan building: {step}")

        def why_unwanted() -> str:
            is_wanted = lifecycle.is_serving(stand_in) and not self._over.is_set()
            return "" if is_wanted else f"model '{name}': what it is prepared for is not served"

        if reason := lifecycle.table.why_not(preferred):
            return LoadFailure(ModelConfigError(reason), model_spec=preferred)
        try:
            with while_wanted(why_unwanted):
                lifecycle.build.prepare(ModelLoad(preferred, progress=progress))
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            return LoadFailure.of(error, name, model_spec=preferred)
        with self._hold([name]):
            if not lifecycle.begin_take_over(stand_in, preferred):
                return LoadFailure(GivenUp(why_unwanted() or f"model '{name}': loads now"))
            with while_wanted(why_unwanted), lifecycle.table.loading(preferred):
                serving = lifecycle.table.serving(name)
                load = ModelLoad(preferred, serving, progress, builds=False)
                built = lifecycle.build.model(load)
            if isinstance(built, LoadFailure):
                lifecycle.fall_back(preferred, None)
                return built
            return lifecycle.publish({name: built}).get(name)


# Stands in texts for the directory of the files that a client has sent.
_SENT = Path("(files of the request)")
# A load that has run so long is given up for a later change of the model; a shorter one ends first,
# so that a model which changes often is loaded all the same.
LEAST_LOAD_S = 5.0


@dataclass(eq=False)
class _Hold:
    """The names that one caller holds or waits for.
    Attributes: within: the hold that cannot end before this hold has ended."""

    names: frozenset[str]
    within: _Hold | None


class ModelLocks:
    """Locks by name; several names are locked in one step, so that two callers cannot deadlock. A
    model may request a load during its own load, within the names that are held for it. A request
    that would wait for that load itself is refused."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, _Hold] = {}
        self._all: set[_Hold] = set()
        self._over = False

    @contextmanager
    def hold(
        self,
        names: Collection[str],
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> Iterator[None]:
        """Wait until all of `names` are free, and hold them inside the block. `within` is the model
        that requests the load; the holder of its lock waits for the caller. Raises Cancelled where
        the request was before; Unavailable after `end`, or where the wait would be a deadlock."""
        with self._changed:
            hold = _Hold(frozenset(names), self._held.get(within))
            if hold.within is not None and self._wait_for(hold.names, hold.within):
                raise Unavailable(
                    f"model '{within}' requests {', '.join(sorted(names))}, which would wait for "
                    f"the load of '{within}' that is under way: request it again when that is done"
                )
            self._all.add(hold)
            if cancellation is not None:
                cancellation.when_cancelled(self._look_again)
            while not (self._over or self._held.keys().isdisjoint(names)):
                if cancellation is not None and cancellation.cancelled:
                    self._all.discard(hold)
                    raise Cancelled(
                        f"the load of {', '.join(sorted(names))} was cancelled before it began"
                    )
                self._changed.wait()
            if self._over:
                raise Unavailable("Server exiting")
            self._held.update(dict.fromkeys(hold.names, hold))
        try:
            yield
        finally:
            with self._changed:
                for name in hold.names:
                    del self._held[name]
                self._all.discard(hold)
                self._changed.notify_all()

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Refuse every further hold; return whether all holds ended within `timeout_s`."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def _wait_for(self, names: Collection[str], end: _Hold) -> bool:
        """Return whether `names` become free only after the hold `end` has ended."""
        todo = list(names)
        for name in todo:  # grows while it is walked
            holder = self._held.get(name)
            if holder is end:
                return True
            for hold in self._all:
                if holder is not None and hold.within is holder:
                    todo += [each for each in hold.names if each not in todo]
        return False


class ModelSource(Protocol):
    """Finds the files of models, or the error why they are unusable."""

    def all(self) -> Mapping[str, ModelFiles | ModelConfigError]:
        """Return every model, sorted by name.
        Raises: ModelConfigError: a repository itself cannot be read."""
        ...

    def find(self, name: str) -> ModelFiles | ModelConfigError | None: ...

    def names(self) -> Mapping[str, int]: ...

    @property
    def where(self) -> str:
        """The place of the models, for error texts."""
        ...


class RepositoryLoader:
    """Loads models from the repositories into the registry.

    A failing model affects no other: its serving versions continue to serve, or the model is
    UNAVAILABLE with the reason. The versions that a model's version policy selects are published
    together or not at all, in one step with all other models of the same `load` call. Calls for the
    same model run one after another, calls for different models in parallel.

    Args:
        load_threads: the number of models that one call loads in parallel.
        load_retries: number of further attempts for a model that cannot be loaded; none is made
            once the model is unloaded or replaced.
        signatures: checks every model before its configuration is read; None accepts all models.
        kept: see `IdleModels`.

    Attributes: stop: see `until`."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        source: ModelSource,
        *,
        completion: Completion = USUAL_COMPLETION,
        load_threads: int = 4,
        load_retries: int = 0,
        signatures: SignaturePolicy | None = None,
        kept: Collection[str] = (),
    ) -> None:
        self.lifecycle = lifecycle
        self.table = lifecycle.table
        self.source = source
        self._completion = completion
        self._load_threads = load_threads
        self._load_retries = load_retries
        self._signatures = signatures
        self.stop = threading.Event()
        self._model_locks = ModelLocks()
        self.take_over = TakeOver(lifecycle, self._model_locks.hold)
        anew = partial(self._make_model, builds=True)
        self.idle = IdleModels(lifecycle, self._model_locks.hold, anew, kept)

    @contextmanager
    def until(self, stop: threading.Event | None) -> Iterator[None]:
        """Load no further model inside the block once `stop` is set, and give up loads that go on;
        for the start."""
        self.stop = stop or threading.Event()
        try:
            yield
        finally:
            self.stop = threading.Event()

    def load_all(self) -> list[ModelEntry]:
        """Load every model of the repositories; see `load_named`."""
        models = self.source.all()
        return self._load_each({n: self._read(n, files) for n, files in models.items()}, models)

    def load_named(self, names: Collection[str]) -> list[ModelEntry]:
        """Load the named models and their members, and publish each as soon as it is loaded; return
        an entry of each model that failed."""
        found = self._read_with_members(names)
        absent = {n: LoadFailure(self._absent(n)) for n in names if n not in found}
        return self._load_each({**found, **absent}, names)

    def load(
        self,
        name: str,
        override: Override | None = None,
        *,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> dict[str, LoadFailure]:
        """Load or reload `name` and its members; an unchanged model stays as it is. Returns the
        failures by model name; the predecessor of each failed model still serves.

        Args:
            within: the model that requests the load, possibly during its own load.
            cancellation: of the request; a load that has begun continues.

        Raises: NotFound: no repository holds the model. Cancelled, Unavailable: see
            `ModelLocks.hold`."""
        names = {name}
        while True:
            with self._model_locks.hold(names, within, cancellation):
                found = self._read_with_members([name], override)
                if name not in found:
                    raise self._absent(name)
                if found.keys() <= names:
                    due = self.lifecycle.begin_load(found, {name})
                    built = run_parallel("load", self._load_threads, self._make, due.values())
                    failures = self.lifecycle.publish(dict(zip(due, built, strict=True)))
                    self.take_over.watch(found)
                    return failures
            # Other calls may hold the members: lock those too, then read again.
            names |= found.keys()

    def unload_absent(self, name: str) -> None:
        """Unload `name` if the source has it no longer, and a load that read it before has
        published it since; wait for such a load.
        """
        with self._model_locks.hold({name}):
            if self.source.find(name) is None:
                self.lifecycle.unload(name)

    def close(self, timeout_s: float) -> None:
        """Refuse further loads and clear the registry; wait up to `timeout_s` for models that
        close or load."""
        until = time.monotonic() + timeout_s
        self.take_over.end()
        self.lifecycle.end(timeout_s)
        if not self._model_locks.end(max(0.0, until - time.monotonic())):
            log.warning("repository: still loading after %.1f s", timeout_s)

    def _load_each(self, found: Found, explicit: Collection[str]) -> list[ModelEntry]:
        publish = self.lifecycle.publish
        with self._model_locks.hold(found):
            due = self.lifecycle.begin_load(found, explicit)
            publish({name: read for name, read in due.items() if isinstance(read, LoadFailure)})
            models = [d for d in due.values() if isinstance(d, ModelSpec) and not d.is_ensemble]

            def load(model_spec: ModelSpec) -> None:
                if not self.stop.is_set():
                    built = self._make(model_spec)
                    # What was given up for the stop has not failed.
                    if not (isinstance(built, LoadFailure) and isinstance(built.error, GivenUp)):
                        publish({model_spec.name: built})

            run_parallel("load", self._load_threads, load, models)
            # Last, the ensembles that none of these models has published.
            publish({})
        self.take_over.watch(found)
        entries = self.table.registry.snapshot.entries.values()
        failed = {
            entry.name: entry
            for entry in entries
            if entry.name in found and entry.state is ModelState.UNAVAILABLE
        }
        return list(failed.values())

    def _read_with_members(self, names: Collection[str], override: Override | None = None) -> Found:
        """Return `names` and their members, direct and indirect, as far as files exist."""
        found: Found = {}
        todo = list(names)
        for name in todo:  # grows while it is walked
            if name in found:
                continue
            named = name in names
            read = self._find(name, override if named else None, named=named)
            if read is not None:
                found[name] = read
            if isinstance(read, ModelSpec):
                todo += sorted(read.members)
        return found

    def _find(
        self, name: str, override: Override | None, *, named: bool
    ) -> ModelSpec | LoadFailure | None:
        """Return what a load makes of `name`: `override`, the override that goes on serving, or the
        model on disk. As in Triton a plain load that names the model ends an override with files of
        the client, and one whose files on disk have changed; any other goes on until the unload."""
        if override is not None and override.staged is not None:
            sent = files_in(override.staged.directory)
            sent = replace(sent, holder=override.staged, shown=_SENT / name)
            return self._read(name, sent, override)
        serving = self.table.serving_spec(name) if override is None else None
        kept = serving if serving is not None and serving.is_overridden else None
        if kept is not None and not named:
            return kept
        files = self.source.find(name)
        if kept is not None and _is_unchanged(kept.files, files):
            return kept
        return None if files is None else self._read(name, files, override)

    def _read(
        self, name: str, files: ModelFiles | ModelConfigError, override: Override | None = None
    ) -> ModelSpec | LoadFailure:
        if isinstance(files, ModelConfigError):
            return LoadFailure(files)
        try:
            if self._signatures is not None:
                # An override carries no signature, so the signature on disk cannot cover it.
                signed = manifest_and_signature(files.directory) if override is None else None
                self._signatures.check(name, signed)
            return ModelSpec.read(files, override, self._completion)
        except ModelConfigError as error:
            return LoadFailure(type(error)(files.as_shown(str(error))))
        except Exception as error:  # noqa: BLE001 - a configuration may be wrong in unforeseen ways
            return LoadFailure.of(error, name)

    def _make(self, read: ModelSpec | LoadFailure) -> LoadedVersions | LoadFailure:
        if isinstance(read, LoadFailure):
            return read
        if read.is_ensemble:
            return LoadedVersions(read)
        if self.lifecycle.has_canaries and (why := self.idle.wake_held(read.name)):
            log.warning("model %s: its next version has no canary: %s", read.name, why)
        with while_wanted(partial(self._why_unwanted, read, time.monotonic())):
            # What serves on the accelerator serves on while the next version is built for it.
            serving = self.table.serving_spec(read.name)
            waits = serving is not None and not serving.is_degraded
            head = read
            while True:
                may_fall_back = not waits and read.fallback is not None
                built = self._make_model(read, builds=not may_fall_back)
                if not (may_fall_back and isinstance(built, LoadFailure)):
                    return built
                stand_in = read.standing_in(head, built.reason)
                is_over = isinstance(built.error, GivenUp)
                if is_over or not self.lifecycle.fall_back(read, stand_in):
                    return built
                read = stand_in

    def _why_unwanted(self, read: ModelSpec, began: float) -> str:
        if self.table.over or self.stop.is_set():
            return f"model '{read.name}': its load was given up: the server ends"
        loads_s = time.monotonic() - began
        if loads_s < LEAST_LOAD_S:
            return ""
        with self.table.lock:
            outdated = self.table.get(read.name).outdates(read)
        what = f"model '{read.name}': its load was given up after {loads_s:.0f} s"
        return f"{what}: a later change of the model came" if outdated else ""

    def _make_model(self, read: ModelSpec, *, builds: bool) -> LoadedVersions | LoadFailure:
        if reason := self.table.why_not(read):
            return LoadFailure(ModelConfigError(reason), model_spec=read)
        progress = partial(self.lifecycle.report_progress, read.name)
        for attempt in range(1, self._load_retries + 2):
            load = ModelLoad(read, self.table.serving(read.name), progress, builds)
            with self.table.loading(read):
                built = self.lifecycle.build.model(load)
            if (
                attempt > self._load_retries
                or read.fallback is not None
                or not isinstance(built, LoadFailure)
                or isinstance(built.error, GivenUp)
                or self.stop.is_set()
                or not self.lifecycle.expects(read)
            ):
                break
            log.warning(
                "model %s: loading failed, retry %d of %d: %s",
                read.name,
                attempt,
                self._load_retries,
                built.reason,
            )
        return built

    def _absent(self, name: str) -> NotFound:
        if not is_model_name(name):
            return NotFound(f"'{name}' is no model: {NAME_RULE}")
        return NotFound(f"no model '{name}' in {self.source.where}")


def _is_unchanged(overridden: ModelFiles, on_disk: ModelFiles | ModelConfigError | None) -> bool:
    """Whether an override is of the files on disk, and they are what they were at its load."""
    return (
        not isinstance(overridden.holder, StagedFiles)
        and isinstance(on_disk, ModelFiles)
        and on_disk.fingerprint == overridden.fingerprint
    )
