"""Sampling: one of every `rate` requests is traced, for all models or for one, up to a count."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    Changes = Mapping[str, Any]


@dataclass(frozen=True)
class TraceRule:
    """The trace settings.

    Attributes:
        timestamps: whether any request is traced.
        rate: one of so many requests is traced; 0 is allowed only without timestamps.
        count: traces left; -1 is unlimited.
        log_frequency: traces in a file before the next is begun; 0 is one file.
    """

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


class Sampler:
    """Applies one rule to requests, on any thread.

    Traces of one sampler share a series of numbered files.
    """

    def __init__(self, rule: TraceRule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._seen = itertools.count(1)
        self._left = rule.count

    @property
    def rule_now(self) -> TraceRule:
        """The rule, with its remaining count."""
        return replace(self.rule, count=self._left)

    def take(self) -> bool:
        """Whether the next request is traced: the last of every `rate`."""
        if not self.rule.timestamps or self._left == 0 or next(self._seen) % self.rule.rate:
            return False
        with self._lock:
            if self._left > 0:
                self._left -= 1
                return True
            return self._left < 0


@dataclass(frozen=True)
class _Group:
    """The settings given for all models, or for one, and the resulting sampler."""

    said: Mapping[str, Any]
    sampler: Sampler


class Sampling:
    """The rule of all models, and those of models with settings of their own.

    As in Triton: a setting not given for a model is that of all models, but the model has its own
    count; a setting not given for all models keeps its value from the start. A rule that changes
    counts its requests anew.
    """

    def __init__(self, at_start: TraceRule) -> None:
        self._at_start = at_start
        self._lock = threading.Lock()
        self._of_all = _Group({}, Sampler(at_start))
        self._of_models: Mapping[str, _Group] = {}

    @property
    def any_on(self) -> bool:
        """Whether any request at all may be traced."""
        return any(
            group.sampler.rule.timestamps for group in (self._of_all, *self._of_models.values())
        )

    def sampler(self, model_name: str) -> Sampler:
        """The sampler of that model; empty is that of all models without one of their own."""
        return self._of_models.get(model_name, self._of_all).sampler

    def change(self, model_name: str, changes: Changes) -> None:
        """Apply new settings, all or none.

        Args:
            model_name: empty is all models.
            changes: by the names of `TraceRule`; None removes the setting.

        Raises:
            InvalidRequest: no request can be traced with these settings (Triton's text).
        """
        with self._lock:
            of_all, of_models = self._of_all, dict(self._of_models)
            if model_name:
                own = of_models.pop(model_name, None)
                changed = _changed(own, of_all.sampler.rule_now, changes)
                if changed.said:
                    of_models[model_name] = changed
            else:
                of_all = _changed(of_all, self._at_start, changes)
                below = of_all.sampler.rule_now
                of_models = {name: _changed(own, below, {}) for name, own in of_models.items()}
            self._of_all, self._of_models = of_all, of_models


def _changed(group: _Group | None, below: TraceRule, changes: Changes) -> _Group:
    """`group` after `changes`, with the settings of `below` where `group` has none.

    Raises:
        InvalidRequest: see `Sampling.change`.
    """
    before: dict[str, Any] = {}
    if group is not None:
        before |= group.said
        if "count" in before:
            before["count"] = group.sampler.rule_now.count
    said = {name: value for name, value in {**before, **changes}.items() if value is not None}
    rule = replace(below, **said)
    if rule.timestamps and rule.rate == 0:
        raise InvalidRequest(
            "Attempting to set invalid trace setting :sample rate must be non-zero"
        )
    if group is not None and group.sampler.rule_now == rule:
        return _Group(said, group.sampler)
    return _Group(said, Sampler(rule))
