"""The states of the newest delivery of a model, in mode POLL, without clock, lock or file.

docs/deployment_states.md shows which event leads from one to another; `ModelRecord` has a method
for each event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edge_server.process.threads import Backoff
from edge_server.repository.verdicts import LOADING, WAITS

if TYPE_CHECKING:
    from edge_server.repository.store import StagedModel

# Between two loads of one model, so that fluctuating memory does not cause a busy loop.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class Outcome(NamedTuple):
    """What a delivery has come to, for its `digest`; one of the outcomes of `verdicts`."""

    outcome: str = ""
    digest: str = ""
    reason: str = ""


class Retry:
    """When a load or a copy is tried again; the pauses grow.
    Attributes: needs_bytes: the memory that the last load lacked; 0 if it lacked none."""

    def __init__(self, now: float) -> None:
        self.needs_bytes = 0
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.pause(now)

    def pause(self, now: float) -> None:
        self.not_before = now + self._pauses.next_s()


@dataclass(frozen=True, eq=False)
class Settled:
    """It has been loaded, or there is none."""

    copy: StagedModel | None = None


@dataclass(frozen=True, eq=False)
class Uncopied:
    """The store could not copy it, as on a full disk; copied again after a pause."""

    reason: str
    retry: Retry

    @property
    def outcome(self) -> Outcome:
        return Outcome(WAITS, "", self.reason)


@dataclass(frozen=True, eq=False)
class Waiting:
    """It could not be loaded, and may be later.

    Attributes:
        retry: when to load it again; None if only a change of another model can help.
        misfit: it does not fit the ensembles, and is read with a change of another model.
        served: it served last, and nothing else serves."""

    copy: StagedModel
    reason: str
    retry: Retry | None
    misfit: bool
    served: bool

    @property
    def outcome(self) -> Outcome:
        return Outcome(WAITS, self.copy.digest, self.reason)


@dataclass(frozen=True, eq=False)
class Loading:
    """It is to be loaded next, or loads. `was`: the failure that this load is a retry of."""

    copy: StagedModel
    was: Waiting | None = None

    @property
    def outcome(self) -> Outcome:
        return Outcome(LOADING, self.copy.digest)


@dataclass(frozen=True, eq=False)
class Refused:
    """Not tried again until the files change or the content leaves quarantine.
    Attributes: outcome: REFUSED or ROLLED_BACK; without a digest if the content could not be read.
    """

    outcome: Outcome


@dataclass(frozen=True, eq=False)
class Leaving:
    """The model has gone from the repository and is to be unloaded."""

    outcome = Outcome()


Delivery = Settled | Uncopied | Waiting | Loading | Refused | Leaving
