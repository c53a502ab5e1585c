"""The choice of models to roll back when a version fails its canary.

The functions end canaries and publish nothing. The caller holds the lock of the lifecycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_server.lifecycle.model_spec import LoadedVersions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.lifecycle.canary import Canary
    from edge_server.lifecycle.fit import Fit
    from edge_server.lifecycle.model_spec import KeptPredecessor, ModelSpec
    from edge_server.lifecycle.model_table import ModelTable


@dataclass(frozen=True)
class RollbackSet:
    """The models to roll back.

    Attributes:
        back: model name → its predecessor.
        not_at_fault: ensemble name → predecessor of the ensemble whose canary failed for the fault
            of others.
        reason: the reason of the rollback, for the log and the index.
    """

    back: Mapping[str, KeptPredecessor]
    not_at_fault: Mapping[str, KeptPredecessor]
    reason: str


def find_suspects(
    model_spec: ModelSpec, reason: str, table: ModelTable, canary: Canary
) -> RollbackSet:
    """Return the models to roll back after `model_spec` failed its canary, which ends.

    The caller owns the predecessors in the result.
    """
    before = canary.take(model_spec)
    if before is None:
        return RollbackSet({}, {}, reason)
    name = model_spec.name
    if not model_spec.is_ensemble:
        return RollbackSet({name: before}, {}, reason)
    used = table.serving_below(model_spec)
    faults = {}
    for each in used:
        run = table.get(each.name).changed_canary(each)
        if run is not None and (fault := run.monitor.fault()):
            faults[each.name] = fault
    if faults:
        # The fault of the ensemble shows in its members, so the members are at fault.
        bad = [each for each in used if each.name in faults]
        return RollbackSet(canary.take_changed(bad), {name: before}, next(iter(faults.values())))
    if before.built.model_spec is not model_spec:
        return RollbackSet({name: before}, {}, reason)
    return RollbackSet(canary.take_changed(used), {name: before}, f"in ensemble '{name}': {reason}")


def fit_back(
    model_spec: ModelSpec,
    rollback_set: RollbackSet,
    table: ModelTable,
    canary: Canary,
    *,
    take_down: bool,
) -> tuple[RollbackSet, dict[str, LoadedVersions], Fit]:
    """Extend the rollback until it fits, and return it with the offered versions and their fit.

    If the predecessors do not fit otherwise, the models that changed together with an ensemble are
    rolled back, too.

    Args:
        model_spec: the spec that failed its canary.
        rollback_set: the models to roll back.
        table: the records.
        canary: the canaries, which own the predecessors.
        take_down: True unloads ensembles that do not fit even then.
    """
    back = dict(rollback_set.back)
    waiting = {each.name: LoadedVersions(each) for each in table.waiting(())}
    offered = {**waiting, **{name: before.built for name, before in back.items()}}
    found = table.fit(offered, {})
    if not found.refused.keys().isdisjoint(back):
        back.update(canary.take_changed(table.serving_below(model_spec)))
        for before in back.values():
            offered.update((name, LoadedVersions(each)) for name, each in before.ensembles.items())
        offered.update((name, before.built) for name, before in back.items())
        found = table.fit(offered, {})
    if take_down and not found.refused.keys().isdisjoint(back):
        found = table.fit(offered, {}, take_down=True)
    offered = {name: built for name, built in offered.items() if name not in found.refused}
    return replace(rollback_set, back=back), offered, found
