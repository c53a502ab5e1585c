"""What served before a new version, kept until that one has shown that it is no worse."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from edge_server.inference.canary_monitor import CanaryMonitor, CanaryTerms, recorded
from edge_server.lifecycle.build import LoadedVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from edge_server.inference.snapshot import LoadedModel
    from edge_server.lifecycle.model_spec import ModelSpec


# How long the verdict on an ensemble waits for comparisons of its members, and looks for them.
_SETTLES_S = 5.0
_LOOK_S = 0.02


@dataclass(frozen=True, eq=False)
class Before:
    """What there is to go back to.

    Attributes:
        built: open; whoever takes it publishes or closes it.
        ensembles: what those were made of that changed together with it.
        members: of an ensemble, the models that it used, all the way down; open, to be compared
            with, and closed by whoever takes it.
    """

    built: LoadedVersions
    ensembles: Mapping[str, ModelSpec]
    members: tuple[LoadedModel, ...] = ()

    def close(self) -> None:
        """Where nobody wants it."""
        self.built.close()
        self.close_members()

    def close_members(self) -> None:
        """Where `built` is published."""
        LoadedVersions(self.built.model_spec, self.members).close()


class Canary:
    """Puts new versions on probation, and keeps what they replaced open meanwhile.

    A version that replaces one on probation is held against the last one that passed. Versions
    that have no predecessor are not on probation. Of an ensemble all versions are new: it is made
    anew with its members, and may be the one that shows what is wrong with them.

    Args:
        terms: None puts nothing on probation and keeps nothing.
        roll_back: called with draft and reason where a version fails, on a thread of the
            probation's own; by then the version may be replaced or gone.
        on_passed: called likewise where it passes.
        on_news: called likewise with what is to be known of one that serves; empty is nothing any
            more.
    """

    def __init__(
        self,
        terms: CanaryTerms | None,
        roll_back: Callable[[ModelSpec, str], object],
        on_passed: Callable[[ModelSpec], None] = lambda _: None,
        on_news: Callable[[ModelSpec, str], None] = lambda *_: None,
    ) -> None:
        self._terms = terms
        self._roll_back = roll_back
        self._on_passed = on_passed
        self._on_news = on_news
        self._lock = threading.Lock()
        self._canary: dict[str, _Trial] = {}
        # Those too whose thread has still to close what nobody took.
        self._alive: set[_Trial] = set()

    def begin(
        self,
        built: LoadedVersions,
        serving: LoadedVersions | None,
        ensembles: Mapping[str, ModelSpec],
        members: Sequence[LoadedModel] = (),
    ) -> LoadedVersions:
        """`built` as it is to be published in place of `serving`, its new versions watched.

        Args:
            serving: open, and nobody closes it before this returns.
            ensembles: what those serve as that change together with it.
            members: of `serving`; see `Before`. Open likewise.
        """
        terms, name = self._terms, built.model_spec.name
        if terms is None:
            return built
        new = {model.version for model in built.models} - built.kept
        former = self._end(name)
        if former is not None:
            new |= former.versions
        watched = [model for model in built.models if model.version in new]
        before = None
        if watched and serving is not None:
            # The one before may pass in this moment.
            kept = None if former is None else self._take(former)
            if kept is None:
                before = Before(_held(serving), ensembles, _shared(members))
            else:
                before = replace(kept, ensembles={**ensembles, **kept.ensembles})
        if former is not None:
            former.probation.stop()
        if before is None or not before.built.models:
            if before is not None:
                before.close()
            return replace(built, models=tuple(recorded(m, terms) for m in built.models))
        trial = self._trial(terms, built.model_spec, before, frozenset(m.version for m in watched))
        models = [
            trial.probation.watch(m, _predecessor(m, before.built), before.members)
            if m in watched
            else recorded(m, terms)
            for m in built.models
        ]
        with self._lock:
            self._canary[name] = trial
            self._alive.add(trial)
        trial.probation.start()
        return replace(built, models=tuple(models))

    def record(self, built: LoadedVersions) -> LoadedVersions:
        """`built` as it is to be published on no probation; that of what it replaces is over."""
        self.forget([built.model_spec.name])
        terms = self._terms
        if terms is None:
            return built
        return replace(built, models=tuple(recorded(m, terms) for m in built.models))

    def has_change(self, model_spec: ModelSpec) -> bool:
        """Whether `draft` is on probation, and what served before was made of another one."""
        with self._lock:
            return self._changed(model_spec) is not None

    def fault(self, model_spec: ModelSpec) -> str:
        """What the answers of such a one show by now to be worse; empty where they do not."""
        with self._lock:
            trial = self._changed(model_spec)
        return "" if trial is None else trial.probation.fault()

    def has(self, name: str) -> bool:
        """Whether versions of that model are on probation."""
        with self._lock:
            return name in self._canary

    def take(self, model_spec: ModelSpec) -> Before | None:
        """What served before `draft`, which ends its probation; None where nothing is kept."""
        trial = self._end(model_spec.name, model_spec)
        if trial is None:
            return None
        before = self._take(trial)
        trial.probation.stop()
        return before

    def forget(self, names: Collection[str]) -> None:
        """These serve no more; what is kept for them is closed soon, on another thread."""
        for name in names:
            trial = self._end(name)
            if trial is not None:
                trial.probation.stop()

    def close(self, timeout_s: float) -> None:
        """End every probation; wait that long, for all, until what they keep is closed."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._canary.clear()
            alive = list(self._alive)
        for trial in alive:
            trial.probation.stop()
        for trial in alive:
            trial.probation.wait_over(max(0.0, until - time.monotonic()))

    def _trial(
        self, terms: CanaryTerms, model_spec: ModelSpec, before: Before, versions: frozenset[int]
    ) -> _Trial:
        trial = _Trial(model_spec, before, versions)
        trial.probation = CanaryMonitor(
            model_spec.name,
            terms,
            on_failed=partial(self._failed, trial),
            on_passed=partial(self._on_passed, model_spec),
            on_over=partial(self._over, trial),
            on_news=partial(self._on_news, model_spec),
        )
        return trial

    def _failed(self, trial: _Trial, reason: str) -> None:
        model_spec = trial.model_spec
        end_s = time.monotonic() + _SETTLES_S
        # Whether a member or its ensemble is at fault is known when both have been compared.
        while model_spec.is_ensemble and self._have_doubts() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with self._lock:
            # Where a member has gone back meanwhile, its ensemble is on another trial.
            is_current = self._canary.get(model_spec.name) is trial
        if is_current:
            self._roll_back(model_spec, reason)

    def _have_doubts(self) -> bool:
        with self._lock:
            return any(trial.probation.has_doubts for trial in self._canary.values())

    def _changed(self, model_spec: ModelSpec) -> _Trial | None:
        trial = self._canary.get(model_spec.name)
        if trial is None or trial.model_spec is not model_spec or trial.before is None:
            return None
        return None if trial.before.built.model_spec is model_spec else trial

    def _end(self, name: str, model_spec: ModelSpec | None = None) -> _Trial | None:
        """The trial of that model, or of that very draft, which is none any more."""
        with self._lock:
            trial = self._canary.get(name)
            if trial is None or model_spec not in (None, trial.model_spec):
                return None
            return self._canary.pop(name)

    def _take(self, trial: _Trial) -> Before | None:
        """What it keeps, the caller's from now on."""
        with self._lock:
            before, trial.before = trial.before, None
            return before

    def _over(self, trial: _Trial) -> None:
        with self._lock:
            if self._canary.get(trial.model_spec.name) is trial:
                del self._canary[trial.model_spec.name]
        before = self._take(trial)
        if before is not None:
            before.close()
        with self._lock:
            self._alive.discard(trial)


class _Trial:
    """One model's new versions on probation.

    Attributes:
        draft: what they were made of.
        before: None once it is somebody else's.
        probation: set by whoever makes the trial.
    """

    probation: CanaryMonitor

    def __init__(self, model_spec: ModelSpec, before: Before, versions: frozenset[int]) -> None:
        self.model_spec = model_spec
        self.before: Before | None = before
        self.versions = versions


def _held(serving: LoadedVersions) -> LoadedVersions:
    return replace(serving, models=_shared(serving.models))


def _shared(models: Iterable[LoadedModel]) -> tuple[LoadedModel, ...]:
    """Those of them that are open."""
    shared = (model.shared(model.config) for model in models)
    return tuple(model for model in shared if model is not None)


def _predecessor(model: LoadedModel, before: LoadedVersions) -> LoadedModel:
    """The same version as it was, or the latest."""
    return max(before.models, key=lambda old: (old.version == model.version, old.version))
