"""The table of the records of all models, and the registry that shows them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.inference.registry import ModelState
from edge_server.lifecycle.fit import Fit, fit
from edge_server.lifecycle.model_spec import Part
from edge_server.lifecycle.records import ModelRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from edge_server.inference.registry import LoadedModel, ModelEntry, ModelRegistry
    from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec
    from edge_server.repository.change_detector import SeenFiles


class ModelTable:
    """The records of all models, and the registry that shows them. Thread-safe.

    Attributes:
        registry: derived from the records; changed by the table and the lifecycle alone.
        lock: guards all records, and every change of the registry; never held while a model loads
            or is copied.
        changed: notified when an update ends.
        over: True once the daemon unloads everything for good.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.over = False
        self._records: dict[str, ModelRecord] = {}

    def serves(self, name: str) -> ModelSpec | None:
        """Return the spec of the READY versions of `name`; None if no version is READY."""
        with self.lock:
            return self.get(name).spec

    def serving(self, name: str) -> LoadedVersions | None:
        """Return the serving versions of `name`, which the caller may share but never closes."""
        with self.lock:
            return self.get(name).serving

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        """Return every known model version, sorted by name and version."""
        entries = sorted(self.registry.snapshot.entries.items())
        return [e for _, e in entries if e.state is ModelState.READY or not only_ready]

    def note_start(self, *, failed: bool) -> None:
        """Show whether no repository could be read at the start, and no model was loaded since."""
        self.registry.failed_start = failed

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
        """Show the records of `names` in the registry, in one step."""
        self.registry.publish({name: self.get(name).entries() for name in names})

    def seen(self) -> dict[str, SeenFiles]:
        """Return model name → the files that the last scan of the repositories found."""
        return {record.name: record.seen for record in self if record.seen is not None}

    def note_seen(self, seen: Mapping[str, SeenFiles]) -> None:
        """Note what a scan of the repositories found; a directory that came and went again leaves
        no record."""
        for name in {**self._records, **seen}:
            record = self[name]
            record.seen = seen.get(name)
            if record.is_blank:
                del self._records[name]

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
            and not any(self._is_coming(m) for m in self.below(spec) if m not in loaded)
        ]

    def below(self, model_spec: ModelSpec) -> list[str]:
        """Return the members of `model_spec`, direct and indirect."""
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
        """Return which of the `offered` models can be published; see `fit.fit`."""
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

        Args:
            name: the model to unload.
            with_members: also unload the members that were not requested by name and that no other
                ensemble uses.

        Returns:
            The names of the unloaded models, and of those whose entries change.
        """
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

    def _is_coming(self, name: str) -> bool:
        coming = self.get(name).coming
        return coming is not None and not coming.is_ensemble

    def _is_left_over(self, name: str) -> bool:
        uses = (spec.members for record in self for spec in record.specs)
        return not self.get(name).explicit and not any(name in members for members in uses)
