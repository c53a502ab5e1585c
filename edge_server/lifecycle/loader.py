"""From files to models that answer: read, build beside the registry, publish."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from edge_server.backends.server_context import STANDALONE
from edge_server.errors import ModelConfigError, NotFound
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.snapshot import ModelState
from edge_server.lifecycle.build import Build, LoadedVersions, LoadFailure
from edge_server.lifecycle.interface_rule import USUAL_INTERFACE_RULE
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.model_locks import ModelLocks
from edge_server.lifecycle.model_spec import ModelSpec
from edge_server.model_config.config import USUAL_COMPLETION
from edge_server.repository.scan import NAME_RULE, files_in, is_model_name
from edge_server.repository.staged_copy import what_came_with

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping

    from edge_server.backends.server_context import ServerContext
    from edge_server.errors import EdgeServerError
    from edge_server.gpu.devices import Devices
    from edge_server.inference.canary_monitor import CanaryTerms
    from edge_server.inference.registry import ModelRegistry
    from edge_server.inference.snapshot import ModelEntry
    from edge_server.lifecycle.budget import MemoryBudget
    from edge_server.lifecycle.interface_rule import InterfaceRule
    from edge_server.lifecycle.model_spec import Override
    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.signature import SignaturePolicy
    from edge_server.repository.source import ModelSource
    from edge_server.requests import Cancellation

    Found = dict[str, ModelSpec | LoadFailure]

log = logging.getLogger(__name__)


class RepositoryLoader:
    """Loads models of the repositories into the registry, and takes them out again.

    One model's fault is that model's: what serves goes on serving, what does not is UNAVAILABLE
    with the reason, the others load. The versions that a model's policy asks for are published
    together or not at all, and with them whatever else one `load` brings.

    Calls for one model wait for each other, those for different models do not.

    Args:
        registry: where the models go; nobody else writes there.
        source: where their files are.
        scheduling: what the models' schedulers share.
        completion: what a configuration may leave out.
        load_threads: how many models one call loads at once.
        budget, devices, surroundings: see `Build`.
        signatures: asked about every model before its configuration is read; None takes all.
        probation, on_rolled_back, take_down, interface: see `ModelLifecycle`.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        source: ModelSource,
        *,
        scheduling: Scheduling | None = None,
        completion: Completion = USUAL_COMPLETION,
        load_threads: int = 4,
        budget: MemoryBudget | None = None,
        devices: Devices | None = None,
        server_context: ServerContext = STANDALONE,
        probation: CanaryTerms | None = None,
        on_rolled_back: Callable[[ModelSpec, str], None] = lambda *_: None,
        on_passed: Callable[[ModelSpec], None] = lambda _: None,
        take_down: bool = False,
        signatures: SignaturePolicy | None = None,
        interface: InterfaceRule = USUAL_INTERFACE_RULE,
    ) -> None:
        self._signatures = signatures
        self._registry = registry
        self._source = source
        self._completion = completion
        self._load_threads = load_threads
        self._build = Build(scheduling or Scheduling(), budget, devices, server_context)
        self._lifecycle = ModelLifecycle(
            registry,
            self._build,
            probation,
            on_rolled_back,
            on_passed,
            take_down=take_down,
            interface=interface,
        )
        self._model_locks = ModelLocks()

    def load_all(self, stop: threading.Event | None = None) -> list[ModelEntry]:
        """Load every model there is; see `load_named`.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        models = self._source.all()
        return self._load_each(
            {n: self._read(n, files) for n, files in models.items()}, models, stop
        )

    def load_named(
        self, names: Collection[str], stop: threading.Event | None = None
    ) -> list[ModelEntry]:
        """Load these models and what they depend on, each published as soon as it is there.

        Args:
            stop: once it is set no further model is loaded; those not reached stay LOADING.

        Returns:
            The models that failed, one entry for each.
        """
        found = self._read_with_members(names)
        absent = {n: LoadFailure(self._absent(n)) for n in names if n not in found}
        return self._load_each({**found, **absent}, names, stop)

    def load(
        self,
        name: str,
        override: Override | None = None,
        *,
        within: str = "",
        cancellation: Cancellation | None = None,
    ) -> dict[str, LoadFailure]:
        """Load or reload `name` and what it depends on; what has not changed stays as it is.

        Args:
            within: the model that asks for it, perhaps while it is loaded itself.
            cancellation: of the request for it; a load that has begun goes on.

        Returns:
            Those of them that failed; what served before them still does.

        Raises:
            NotFound: no repository has it.
            Cancelled: the request was cancelled before the load began.
            Unavailable: the loader is closed, or it would wait for the load of `within`.
        """
        names = {name}
        while True:
            with self._model_locks.hold(names, within, cancellation):
                found = self._read_with_members([name], override)
                if name not in found:
                    raise self._absent(name)
                if found.keys() <= names:
                    due = self._lifecycle.begin(found, {name})
                    with ThreadPoolExecutor(self._load_threads, "load") as pool:
                        results = pool.map(self._make, due.values())
                        built = dict(zip(due, results, strict=True))
                    return self._lifecycle.publish(built)
            # Others may be at work on its members; their turns come first.
            names |= found.keys()

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Let nobody new use `name`; see `ModelLifecycle.unload`."""
        self._lifecycle.unload(name, with_members=unload_dependents)

    def refuse(self, name: str, error: EdgeServerError) -> None:
        """`name` cannot be loaded as it is now, for that reason; what serves of it serves on.

        Raises:
            Unavailable: the loader is closed.
        """
        with self._model_locks.hold({name}):
            self._lifecycle.publish({name: LoadFailure(error)})

    def serves(self, name: str) -> ModelSpec | None:
        """What the READY versions of `name` were made of."""
        return self._lifecycle.serves(name)

    def on_trial(self, name: str) -> bool:
        """Whether what serves of `name` is on probation."""
        return self._lifecycle.on_trial(name)

    def roll_back(self, model_spec: ModelSpec, reason: str) -> bool:
        """See `ModelLifecycle.roll_back`."""
        return self._lifecycle.roll_back(model_spec, reason)

    def names_on_disk(self) -> Mapping[str, int]:
        """Model name → in how many repositories it is, at this moment.

        Raises:
            ModelConfigError: a repository itself cannot be read.
        """
        return self._source.names()

    def close(self, timeout_s: float) -> None:
        """Load nothing more, forget every model; wait that long for what closes and loads."""
        until = time.monotonic() + timeout_s
        self._lifecycle.end(timeout_s)
        if not self._model_locks.end(max(0.0, until - time.monotonic())):
            log.warning("repository: still loading after %.1f s", timeout_s)

    def _load_each(
        self, found: Found, explicit: Collection[str], stop: threading.Event | None
    ) -> list[ModelEntry]:
        publish = self._lifecycle.publish
        with self._model_locks.hold(found):
            due = self._lifecycle.begin(found, explicit)
            publish({name: read for name, read in due.items() if isinstance(read, LoadFailure)})
            models = [d for d in due.values() if isinstance(d, ModelSpec) and not d.is_ensemble]

            def load(model_spec: ModelSpec) -> None:
                if stop is None or not stop.is_set():
                    publish({model_spec.name: self._make(model_spec)})

            with ThreadPoolExecutor(self._load_threads, "load") as pool:
                list(pool.map(load, models))
            # The ensembles that none of these has brought along.
            publish({})
        entries = self._registry.snapshot.entries.values()
        failed = {
            entry.name: entry
            for entry in entries
            if entry.name in found and entry.state is ModelState.UNAVAILABLE
        }
        return list(failed.values())

    def _read_with_members(self, names: Collection[str], override: Override | None = None) -> Found:
        """`names` and the members that they use, all the way down, as far as they exist."""
        found: Found = {}
        todo = list(names)
        for name in todo:  # grows while it is walked
            if name in found:
                continue
            read = self._find(name, override) if name in names else self._find_member(name)
            if read is not None:
                found[name] = read
            if isinstance(read, ModelSpec):
                todo += sorted(read.members)
        return found

    def _find_member(self, name: str) -> ModelSpec | LoadFailure | None:
        serving = self._lifecycle.serves(name)
        if serving is not None and serving.is_overridden:
            # It goes back to what is on disk when it is asked for itself.
            return serving
        return self._find(name, None)

    def _find(self, name: str, override: Override | None) -> ModelSpec | LoadFailure | None:
        if override is not None and override.staged is not None:
            return self._read(name, files_in(override.staged.directory), override)
        files = self._source.find(name)
        return None if files is None else self._read(name, files, override)

    def _read(
        self, name: str, files: ModelFiles | ModelConfigError, override: Override | None = None
    ) -> ModelSpec | LoadFailure:
        if isinstance(files, ModelConfigError):
            return LoadFailure(files)
        try:
            if self._signatures is not None:
                # Whatever a client brings was signed by nobody, nor what it makes of the rest.
                said = what_came_with(files.directory) if override is None else None
                self._signatures.check_loaded(name, said)
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
        tell = partial(self._lifecycle.tell, read.name)
        return self._build.model(read, self._lifecycle.serving(read.name), tell)

    def _absent(self, name: str) -> NotFound:
        if not is_model_name(name):
            return NotFound(f"'{name}' is no model: {NAME_RULE}")
        return NotFound(f"no model '{name}' in {self._source.where}")
