"""Batching strategies: which sequences of an instance run together, and when; pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class Head(NamedTuple):
    """The first request of a sequence that may run.

    Attributes:
        slot: the sequence's, within its instance.
        came_at: in s.
        form: equal for requests whose tensors can be joined.
    """

    slot: int
    came_at: float
    form: Hashable


class Choice(NamedTuple):
    """The decision of a strategy.

    Attributes:
        batch: by row; None is a row of padding. Empty: wait.
        wait_s: how long to wait, if no further request comes.
    """

    batch: Sequence[Head | None]
    wait_s: float = 0.0


class Strategy(Protocol):
    """Forms batches from the heads of one instance."""

    def choose(self, heads: Sequence[Head], now: float) -> Choice:
        """Decide on `heads`, at least one, by slot number."""
        ...


@dataclass(frozen=True)
class DirectStrategy:
    """Gives each sequence a batch row of its own for the sequence's lifetime.

    The batch extends to the highest row with a request; rows without one are padding, and so are
    rows whose request cannot be joined with the oldest: these run in the next batch.

    Args:
        rows: number of rows of a full batch.
        min_utilization, delay_s: while a smaller share of the rows has a request, the oldest one
            waits for others, at most this long; where either is 0 it does not wait.
    """

    rows: int
    min_utilization: float
    delay_s: float

    def choose(self, heads: Sequence[Head], now: float) -> Choice:
        oldest = min(heads, key=lambda head: head.came_at)
        if len(heads) < self.min_utilization * self.rows:
            wait_s = oldest.came_at + self.delay_s - now
            if wait_s > 0:
                return Choice((), wait_s)
        rows = {head.slot: head for head in heads if head.form == oldest.form}
        return Choice([rows.get(row) for row in range(max(rows) + 1)])


@dataclass(frozen=True)
class OldestStrategy:
    """Runs the oldest requests together, in any row.

    A batch that reaches the largest possible preferred size runs at once; so does one that cannot
    grow. Any other waits for more until its oldest request has waited `delay_s`. Batches of one
    instance run one after the other and oldest first, so responses leave in the order in which
    requests may run, whether `preserve_ordering` is set or not.
    """

    max_batch: int
    preferred: tuple[int, ...]
    delay_s: float

    def choose(self, heads: Sequence[Head], now: float) -> Choice:
        by_age = sorted(heads, key=lambda head: head.came_at)
        first = by_age[0]
        batch = list(takewhile(lambda head: head.form == first.form, by_age))[: self.max_batch]
        preferred = max((size for size in self.preferred if size <= len(batch)), default=0)
        if preferred:
            return Choice(batch[:preferred])
        can_grow = len(batch) == len(heads) < self.max_batch
        wait_s = first.came_at + self.delay_s - now
        if can_grow and wait_s > 0:
            return Choice((), wait_s)
        return Choice(batch)
