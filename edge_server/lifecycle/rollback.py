"""What goes back where a version fails on probation, and what has to go or come with it.

Nothing here is published; only trials end. The caller has the lock of the lifecycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_server.lifecycle.build import LoadedVersions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.lifecycle.canary import Before, Canary
    from edge_server.lifecycle.fit import Fit
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.lifecycle.model_states import ModelStates


@dataclass(frozen=True)
class RollbackSet:
    """What goes back.

    Attributes:
        back: by name, what served before each.
        spared: likewise of the ensemble in which it showed, and which is not at fault.
        reason: what is told of those that go back.
    """

    back: Mapping[str, Before]
    spared: Mapping[str, Before]
    reason: str


def find_suspects(
    draft: ModelSpec, reason: str, standing: ModelStates, trials: Canary
) -> RollbackSet:
    """What is to go back where `draft` failed on probation, which is over.

    What is kept for them is the caller's from now on.
    """
    before = trials.take(draft)
    if before is None:
        return RollbackSet({}, {}, reason)
    name = draft.name
    if not draft.is_ensemble:
        return RollbackSet({name: before}, {}, reason)
    serving = standing.wishes.serving()
    used = [serving[n] for n in standing.wishes.below(draft) if n in serving]
    faults = {each.name: fault for each in used if (fault := trials.fault(each))}
    if faults:
        # What is wrong with it shows in them, too.
        bad = [each for each in used if each.name in faults]
        return RollbackSet(_taken(bad, trials), {name: before}, next(iter(faults.values())))
    if before.built.draft is not draft:
        return RollbackSet({name: before}, {}, reason)
    return RollbackSet(_taken(used, trials), {name: before}, f"in ensemble '{name}': {reason}")


def fit_back(
    draft: ModelSpec,
    suspects: RollbackSet,
    standing: ModelStates,
    trials: Canary,
    *,
    take_down: bool,
) -> tuple[RollbackSet, dict[str, LoadedVersions], Fit]:
    """Those that go back, with what has to go or come with them: what is offered, how that fits.

    Where they do not fit otherwise, what changed together with an ensemble goes back, too.

    Args:
        draft: what failed on probation.
        take_down: ensembles give way where even that does not fit.
    """
    wishes, back = standing.wishes, dict(suspects.back)
    waiting = {each.name: LoadedVersions(each) for each in wishes.waiting(())}
    offered = {**waiting, **{name: before.built for name, before in back.items()}}
    found = standing.fit(offered, {})
    if not found.refused.keys().isdisjoint(back):
        below = [wishes[name].serving for name in wishes.below(draft)]
        back.update(_taken((each for each in below if each is not None), trials))
        for before in back.values():
            offered.update((name, LoadedVersions(each)) for name, each in before.ensembles.items())
        offered.update((name, before.built) for name, before in back.items())
        found = standing.fit(offered, {})
    if take_down and not found.refused.keys().isdisjoint(back):
        found = standing.fit(offered, {}, take_down=True)
    offered = {name: built for name, built in offered.items() if name not in found.refused}
    return replace(suspects, back=back), offered, found


def _taken(drafts: Iterable[ModelSpec], trials: Canary) -> dict[str, Before]:
    """What served before those of them that are new."""
    return {
        draft.name: before
        for draft in drafts
        if trials.has_change(draft) and (before := trials.take(draft)) is not None
    }
