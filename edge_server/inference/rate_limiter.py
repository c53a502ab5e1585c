"""The rate limiter: which instances of all models may run at once, by resources and priority."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import EdgeServerError, ModelConfigError
from edge_server.inference.line import Waiter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.model_config.config import InstanceGroup
    from edge_server.requests import Cancellation

# The device of all instances on the CPU, as Triton counts it.
_CPU_DEVICE = 0


@dataclass(frozen=True)
class ResourceLimit:
    name: str
    count: int
    device: int | None = None  # every device, and globally


class Resource(NamedTuple):
    name: str
    device: int | None  # None: all devices share it


class Share:
    """The resources that one instance needs to run, and its turn.

    Attributes:
        turn: its executions so far, each weighted with its priority; the fewest go first.
        running: the instance holds its resources.
    """

    __slots__ = ("needs", "passive", "priority", "running", "turn")

    def __init__(self, group: InstanceGroup, gpu: int | None) -> None:
        device = _CPU_DEVICE if gpu is None else gpu
        self.needs: Mapping[Resource, int] = {
            Resource(each.name, device if each.per_device else None): each.count
            for each in group.resources
            if each.count
        }
        self.priority = group.priority
        self.passive = group.passive
        self.turn = 0
        self.running = False


class RateLimiter:
    """Lets an instance run while the resources that it needs are free.

    Among the waiting instances the one with the fewest executions goes first, each execution
    weighted by the priority, so that priority n gets 1/n of the chances. An instance that is first
    and does not fit reserves its resources against those behind it, so that a large need is not
    passed over for ever; instances that need other resources go on. Idle time earns no chances.

    Args:
        limits: the amounts. Without any, each resource has the largest need of any instance, plus
            the amounts that passive instances hold; with some, an unnamed resource has none.
    """

    def __init__(self, limits: Sequence[ResourceLimit] = ()) -> None:
        self._limits = tuple(limits)
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        self._totals: Mapping[Resource, int] = {}
        self._used: Counter[Resource] = Counter()
        self._claims: list[_Claim] = []
        # The last turn granted per resource: new and returning instances join there.
        self._turns: dict[Resource, int] = {}

    def enrol(self, groups: Sequence[InstanceGroup]) -> list[Share]:
        """Make a share for each instance of `groups`, in order; passive ones hold theirs from now.
        Raises ModelConfigError where the instances need more than there is (Triton's texts).
        """
        joining = [Share(group, place.gpu) for group in groups for place in group.placements]
        with self._lock:
            shares = [*self._shares, *joining]
            self._totals = self._totals_for(shares)
            self._shares = shares
            for share in joining:
                if share.passive:
                    self._used.update(share.needs)
        return joining

    def leave(self, shares: Sequence[Share]) -> None:
        """Forget `shares`; one that still runs is given back as usual."""
        with self._lock:
            for share in shares:
                self._shares.remove(share)
                if share.passive:
                    self._used.subtract(share.needs)
            self._totals = self._totals_for(self._shares)
            self._grant()

    def take(
        self,
        shares: Sequence[Share],
        deadline: float | None,
        cancellation: Cancellation | None = None,
    ) -> Share:
        """Grant one of `shares`, none of them passive, all its resources until `give_back`.

        Raises: DeadlineExceeded, Cancelled: see `Waiter.wait`.
        """
        claim = _Claim(shares, self._lock, cancellation)
        with self._lock:
            for share in shares:
                if not share.running and share.needs:
                    share.turn = max(share.turn, min(self._turns.get(r, 0) for r in share.needs))
            self._claims.append(claim)
            self._grant()
            try:
                return claim.wait(
                    deadline, "the request's deadline passed before an instance had its resources"
                )
            except EdgeServerError:
                self._claims.remove(claim)
                # The resources reserved for this caller are free for those behind.
                self._grant()
                raise

    def give_back(self, share: Share) -> None:
        with self._lock:
            share.running = False
            self._used.subtract(share.needs)
            self._grant()

    def _grant(self) -> None:
        candidates = sorted(
            (
                (share, claim)
                for claim in self._claims
                for share in claim.shares
                if not share.running
            ),
            key=lambda candidate: candidate[0].turn,
        )
        kept: dict[Resource, _Claim] = {}
        for share, claim in candidates:
            if share.running or claim.given is not None:
                continue
            mine = all(kept.get(resource, claim) is claim for resource in share.needs)
            if mine and self._fits(share):
                self._used.update(share.needs)
                self._turns.update(dict.fromkeys(share.needs, share.turn))
                share.turn += share.priority
                share.running = True
                claim.give(share)
            else:
                for resource in share.needs:
                    kept.setdefault(resource, claim)
        self._claims = [claim for claim in self._claims if claim.given is None]

    def _fits(self, share: Share) -> bool:
        return all(
            self._used[r] + count <= self._totals.get(r, 0) for r, count in share.needs.items()
        )

    def _totals_for(self, shares: Sequence[Share]) -> dict[Resource, int]:
        """The amount of each resource; raises as `enrol`."""
        needed = _largest_needs(shares)
        for name in sorted({resource.name for resource in needed}):
            if len({device is None for other, device in needed if other == name}) == 2:
                raise ModelConfigError(
                    f'Resource "{name}" is present as both global and device-specific resource in '
                    "the model configuration."
                )
        if not self._limits:
            return needed
        totals = {resource: self._limit(resource) for resource in needed}
        for resource, count in needed.items():
            if totals[resource] < count:
                raise ModelConfigError(
                    f'Resource count for "{resource.name}" is limited to {totals[resource]} which '
                    "will prevent scheduling of one or more model instances, the minimum required "
                    f"count is {count}; raise its limit, or lower the need in instance_group"
                )
        return totals

    def _limit(self, resource: Resource) -> int:
        return max(
            (
                limit.count
                for limit in self._limits
                if limit.name == resource.name
                and (resource.device is None or limit.device in {None, resource.device})
            ),
            default=0,
        )


class _Claim(Waiter[Share]):
    """Of a caller that wants one of `shares` to run."""

    __slots__ = ("shares",)

    def __init__(
        self, shares: Sequence[Share], lock: threading.Lock, cancellation: Cancellation | None
    ) -> None:
        super().__init__(lock, cancellation)
        self.shares = shares


def _largest_needs(shares: Sequence[Share]) -> dict[Resource, int]:
    """Per resource: the most that one instance needs, plus the amounts of all passive ones."""
    largest: Counter[Resource] = Counter()
    held: Counter[Resource] = Counter()
    for share in shares:
        if share.passive:
            held.update(share.needs)
        else:
            largest |= Counter(share.needs)
    return {resource: largest[resource] + held[resource] for resource in {**largest, **held}}
