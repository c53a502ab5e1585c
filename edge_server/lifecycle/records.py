"""The records of all models: what the registry shows of them, and what the store keeps."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.inference.registry import ModelState
from edge_server.lifecycle.deployment import ModelRecord, copy_of
from edge_server.lifecycle.fit import Fit, fit
from edge_server.lifecycle.model_spec import Part
from edge_server.repository.scan import files_in
from edge_server.repository.verdicts import VerdictFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from edge_server.inference.registry import LoadedModel, ModelRegistry
    from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.store import ModelStore, StagedModel
    from edge_server.repository.verdicts import Verdict

log = logging.getLogger(__name__)

# `torn`: the model changed while the store copied it, and is scanned again; `failed`: the
# predecessor continues to serve.
OUTCOMES = ("loaded", "unchanged", "removed", "torn", "failed", "rolled_back")


class ModelTable:
    """The records of all models, and the registry that shows them. Thread-safe. Nothing of it
    outlives the process; `Deployments` is the table of mode POLL.

    Attributes:
        registry: derived from the records; changed by the table and the lifecycle alone.
        lock: guards all records, and every change of the registry; never held during a load or a
            copy.
        changed: notified when an update ends.
        over: True once the daemon unloads everything for good."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.over = False
        self._records: dict[str, ModelRecord] = {}

    def serving_spec(self, name: str) -> ModelSpec | None:
        with self.lock:
            return self.get(name).spec

    def serving(self, name: str) -> LoadedVersions | None:
        with self.lock:
            return self.get(name).serving

    # What `Deployments` keeps.

    def quarantine(self, model_spec: ModelSpec, reason: str, *, only_this: bool) -> None:
        """Quarantine a version that failed its canary, or `only_this` configuration of its files,
        before its predecessor is published again: a process that is killed once anybody knows of
        the rollback must not serve it after its restart. The caller holds the lock."""

    def commit(self) -> None:
        """Keep what serves and is in no canary, or has passed it, for a restart; report all."""

    def why_not(self, model_spec: ModelSpec) -> str:
        """Return why this configuration must not be loaded; "" if it may."""
        del model_spec
        return ""

    def loading(self, model_spec: ModelSpec) -> AbstractContextManager[None]:
        """Count the death of the process inside the block against this configuration alone."""
        del model_spec
        return nullcontext()

    def has_served(self, model_spec: ModelSpec) -> bool:
        """Return whether the content of `model_spec` served before, under its name."""
        del model_spec
        return False

    # The caller of the methods below holds the lock.

    def __getitem__(self, name: str) -> ModelRecord:
        """Return the record of `name`; a new one for a model that has none yet."""
        return self._records.setdefault(name, ModelRecord(name))

    def get(self, name: str) -> ModelRecord:
        """Return the record of `name`; without one, a blank one that the table does not keep."""
        return self._records.get(name) or ModelRecord(name)

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(list(self._records.values()))

    def publish(self, names: Iterable[str]) -> None:
        self.registry.publish({name: self.get(name).entries() for name in names})

    def end(self) -> None:
        """Forget for good which models load and serve; their canaries are ended by the caller."""
        self.over = True
        for record in self:
            record.coming = record.serving = record.canary = None

    def waiting(self, loaded: Collection[str]) -> list[ModelSpec]:
        """Return the coming ensembles none of whose members, direct or indirect, is still loading;
        the models in `loaded` count as loaded."""
        return [
            spec
            for spec in (record.coming for record in self)
            if spec is not None
            and spec.is_ensemble
            and not any(
                (coming := self.get(m).coming) is not None and not coming.is_ensemble
                for m in self.below(spec)
                if m not in loaded
            )
        ]

    def below(self, model_spec: ModelSpec) -> list[str]:
        found = sorted(model_spec.members)
        for name in found:  # grows while it is walked
            members = {m for spec in self.get(name).specs for m in spec.members}
            found += sorted(members.difference(found))
        return found

    def serving_below(self, model_spec: ModelSpec) -> list[ModelSpec]:
        """Return the specs of the members of `model_spec` that serve, direct and indirect."""
        specs = (self.get(name).spec for name in self.below(model_spec))
        return [spec for spec in specs if spec is not None]

    def members(self, serving: LoadedVersions) -> tuple[LoadedModel, ...]:
        """Return the models that a serving ensemble uses, direct and indirect; open as long as the
        ensemble serves."""
        # Not the records: the members may change in the step that is to be published.
        entries = self.registry.snapshot.entries.values()
        members: dict[str, list[LoadedModel]] = {}
        todo = [step.model_name for model in serving.models for step in model.config.steps]
        for name in todo:  # grows while it is walked
            if name not in members:
                members[name] = [e.loaded for e in entries if e.name == name and e.loaded]
                todo += [step.model_name for m in members[name] for step in m.config.steps]
        return tuple(model for models in members.values() for model in models)

    def fit(
        self,
        offered: Mapping[str, LoadedVersions],
        failed: Mapping[str, LoadFailure],
        *,
        take_down: bool = False,
    ) -> Fit:
        serving: dict[str, Part] = {}
        reasons: dict[str, str] = {}
        for record in self:
            if record.serving is not None:
                configs = {model.version: model.config for model in record.serving.models}
                serving[record.name] = Part(record.serving.model_spec, configs)
            elif record.state is not ModelState.UNKNOWN:
                reasons[record.name] = record.reason or record.state.value
        reasons.update((name, failure.reason) for name, failure in failed.items())
        parts = {name: built.as_part() for name, built in offered.items()}
        return fit(parts, serving, reasons, take_down=take_down)

    def unload(self, name: str, *, with_members: bool) -> tuple[list[str], list[str]]:
        """Unload `name`, and the ensembles that use it, which then wait for it.
        Returns: The names of the unloaded models, and of those whose entries change."""
        gone, changed = [name], []
        for each in gone:  # grows while it is walked
            record = self.get(each)
            spec = record.spec or record.coming
            if record.unload(waits=False):
                changed.append(each)
            if with_members and spec is not None:
                gone += sorted(m for m in spec.members if self._is_left_over(m))
        for used in gone:  # grows while it is walked
            for record in self:
                if record.spec is not None and used in record.spec.members:
                    gone.append(record.name)
                    changed.append(record.name)
                    record.unload(waits=True)
        return gone, changed

    def _is_left_over(self, name: str) -> bool:
        uses = (spec.members for record in self for spec in record.specs)
        return not self.get(name).explicit and not any(name in members for members in uses)


class AcceptedCopies:
    """The `ModelSource` of mode POLL: the copies that the records accept."""

    where = "the accepted copies of the model repositories"

    def __init__(self, table: ModelTable) -> None:
        self._table = table

    def all(self) -> Mapping[str, ModelFiles | ModelConfigError]:
        found = {name: self.find(name) for name in self.names()}
        return {name: files for name, files in found.items() if files is not None}

    def find(self, name: str) -> ModelFiles | ModelConfigError | None:
        with self._table.lock:
            record = self._table.get(name)
            copy, shown = record.accepted, record.shown
        if copy is None:
            return None
        try:
            files = replace(files_in(copy.directory), fingerprint=copy.fingerprint)
        except ModelConfigError as error:
            return error
        return replace(files, holder=copy, shown=shown)

    def names(self) -> Mapping[str, int]:
        with self._table.lock:
            names = sorted(record.name for record in self._table if record.accepted is not None)
        return dict.fromkeys(names, 1)


class Deployments(ModelTable):
    """The table of mode POLL, kept consistent with the store and with the verdicts for
    `models push`. Thread-safe."""

    def __init__(
        self, registry: ModelRegistry, store: ModelStore, repositories: Sequence[Path]
    ) -> None:
        super().__init__(registry)
        self.store = store
        self._verdicts = VerdictFile(store.directory, repositories)
        self._committing = threading.Lock()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def count(self, outcome: str) -> None:
        with self.lock:
            self._outcomes[outcome] += 1

    def outcomes(self) -> dict[str, int]:
        with self.lock:
            return dict(self._outcomes)

    def report(self) -> None:
        """Write the verdicts that differ from the written ones."""

        def verdicts() -> dict[str, Verdict]:
            with self.lock:
                found = {record.name: record.verdict(self.store.directory) for record in self}
            return {name: verdict for name, verdict in found.items() if verdict.outcome}

        # At the end of the daemon nothing serves any more, which is no news of a model.
        if not self.over:
            self._verdicts.write(verdicts)

    def judge(self, name: str, served: str, text: str) -> None:
        """Note what was found of the serving content of `name` as a candidate for `served`."""
        with self.lock:
            record = self[name]
            if (copy := record.serving_copy) is not None:
                record.candidate = copy.digest, text, served
        self.report()

    def verdict(self, name: str) -> Verdict:
        with self.lock:
            return self.get(name).verdict(self.store.directory)

    def unchanged(self, copy: StagedModel, serving: StagedModel) -> None:
        """Note that `copy` has the content of `serving`, so a restart need not copy it again."""
        self.count("unchanged")
        with self.lock:
            record = self[copy.name]
            record.unchanged(copy, serving)
            is_good = record.last_good is serving
        if is_good:
            try:
                self.store.commit(copy)
            except EdgeServerError as error:
                log.warning("model %s: is copied again after a restart: %s", copy.name, error)
        self.report()

    def commit(self) -> None:
        """See `ModelTable.commit`. A copy that the store could not commit is tried again by the
        next call."""
        with self._committing:
            with self.lock:
                due = [(r, copy) for r in self if (copy := r.uncommitted) is not None]
            for record, copy in due:
                if self.store.quarantined(copy.digest):
                    continue
                try:
                    self.store.commit(copy)
                except EdgeServerError as error:
                    with self.lock:
                        is_news, record.late = not record.late, str(error)
                    if is_news:
                        log.warning("model %s: is not kept for a restart: %s", copy.name, error)
                    continue
                with self.lock:
                    record.is_good(copy)
                log.info("model %s: last known good is now %.12s", copy.name, copy.digest)
        self.report()

    def quarantine(self, model_spec: ModelSpec, reason: str, *, only_this: bool) -> None:
        copy = copy_of(model_spec)
        if copy is not None:
            self.count("rolled_back")
            digest = _digest_of(model_spec, copy) if only_this else copy.digest
            self.store.quarantine(digest, f"rolled back: {reason}", copy.name)
            if not only_this:
                self[copy.name].rolled_back(copy, reason)

    def why_not(self, model_spec: ModelSpec) -> str:
        copy = copy_of(model_spec)
        if copy is None or model_spec.fallback is None:
            return ""
        reason = self.store.quarantined(_digest_of(model_spec, copy))
        hint = f"let it out with `edge-server models release {copy.name}`"
        return f"quarantined: {reason}; {hint}" if reason else ""

    def loading(self, model_spec: ModelSpec) -> AbstractContextManager[None]:
        copy = copy_of(model_spec)
        if copy is None or model_spec.fallback is None:
            return nullcontext()
        return self.store.loading(copy, _digest_of(model_spec, copy))

    def has_served(self, model_spec: ModelSpec) -> bool:
        copy = copy_of(model_spec)
        return copy is not None and self.store.has_served(copy.name, copy.digest)

    def release_noted(self) -> set[str]:
        """Release what is noted to leave quarantine; return the models to stage again: those that
        had the content, and those that were refused for it."""
        released = self.store.release_noted()
        with self.lock:
            refused = {record.name for record in self if record.outcome.digest in released}
        return refused | set(released.values())


def _digest_of(model_spec: ModelSpec, copy: StagedModel) -> str:
    text = f"{copy.digest} {model_spec.files.config_name}"
    return hashlib.sha256(text.encode()).hexdigest()
