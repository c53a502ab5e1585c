"""The deployment of one model in mode POLL: its states, and what each event makes of them.

`step` is pure: it has no clock, lock, thread or file. docs/deployment_states.md is its table, and a
test drives it beside `updates`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_server.repository.verdicts import GOOD, LOADING, ON_TRIAL, REFUSED, ROLLED_BACK, WAITS

# What serves. `digest` names the content.


@dataclass(frozen=True)
class Absent:
    digest: str = ""


@dataclass(frozen=True)
class Serving:
    """`is_kept`: the copy is committed, so a restart serves it; `is_late`: it could not be."""

    digest: str
    is_kept: bool = True
    is_late: bool = False


@dataclass(frozen=True)
class OnTrial:
    """`before`: the last version that passed; open, and published again if this one is worse."""

    digest: str
    before: Serving


# What becomes of the newest delivery.


@dataclass(frozen=True)
class Settled:
    """It serves, or there is none."""


@dataclass(frozen=True)
class Staging:
    """The store copies it."""


@dataclass(frozen=True)
class Waiting:
    """`digest`: the copy to load again; empty where the store could not copy the model."""

    digest: str
    reason: str


@dataclass(frozen=True)
class Loading:
    digest: str


@dataclass(frozen=True)
class Failed:
    """Tried again only once the files change. `digest`: empty if it could not be read."""

    digest: str
    reason: str


@dataclass(frozen=True)
class Quarantined:
    """Tried again once it is released, or the files change."""

    digest: str
    reason: str


Serves = Absent | Serving | OnTrial
Delivery = Settled | Staging | Waiting | Loading | Failed | Quarantined


@dataclass(frozen=True)
class Deployment:
    """What serves of a model, and what becomes of its newest delivery; each has its own fields."""

    serves: Serves = Absent()
    delivery: Delivery = Settled()


# Events.


@dataclass(frozen=True)
class Started:
    """The daemon has loaded the last known good copy; empty without one."""

    digest: str


@dataclass(frozen=True)
class Changed:
    """The model's files have changed, and are complete."""


@dataclass(frozen=True)
class Removed:
    """The model is gone from the repository."""


@dataclass(frozen=True)
class Copied:
    digest: str


@dataclass(frozen=True)
class NotCopied:
    """`passes`: the next attempt may succeed without a change of the files."""

    reason: str
    passes: bool


@dataclass(frozen=True)
class Held:
    """The copied content is in quarantine."""

    digest: str
    reason: str


@dataclass(frozen=True)
class Loaded:
    digest: str


@dataclass(frozen=True)
class NotLoaded:
    """`passes`: the board lacks something now, such as memory."""

    digest: str
    reason: str
    passes: bool


@dataclass(frozen=True)
class Passed:
    digest: str


@dataclass(frozen=True)
class Worse:
    digest: str
    reason: str


@dataclass(frozen=True)
class Committed:
    digest: str


@dataclass(frozen=True)
class NotCommitted:
    digest: str
    reason: str


@dataclass(frozen=True)
class Released:
    digest: str


@dataclass(frozen=True)
class Due:
    """The pause of a retry is over, and the board has what the last attempt lacked."""


Event = (
    Started
    | Changed
    | Removed
    | Copied
    | NotCopied
    | Held
    | Loaded
    | NotLoaded
    | Passed
    | Worse
    | Committed
    | NotCommitted
    | Released
    | Due
)


@dataclass(frozen=True)
class Action:
    """What the caller does next, in order.

    Attributes:
        verb: `stage`, `load`, `publish` (instead of what serves), `discard` (a load that nothing
            waits for), `watch` (a canary), `commit`, `quarantine`, `unload`, `forget` (its copies)
            or `report`, with the outcome in `text`.
        digest: the content; empty for the model itself.
        text: the reason of a quarantine, or the outcome and its reason.
    """

    verb: str
    digest: str = ""
    text: str = ""
    reason: str = ""


def step(now: Deployment, event: Event) -> tuple[Deployment, tuple[Action, ...]]:
    """Return the deployment after `event`, and what to do. An event that comes too late, about
    content that is no longer awaited, changes nothing."""
    match event:
        case Changed():
            return _stage(now)
        case Released(digest):
            holds = isinstance(now.delivery, Quarantined) and now.delivery.digest == digest
            return _stage(now) if holds else (now, ())
        case Copied() | NotCopied() | Held():
            return _staged(now, event) if isinstance(now.delivery, Staging) else (now, ())
        case Loaded() | NotLoaded():
            return _load_ended(now, event)
        case Due():
            return _retried(now)
    return _served(now, event)


def _stage(now: Deployment) -> tuple[Deployment, tuple[Action, ...]]:
    return replace(now, delivery=Staging()), (Action("stage"),)


def _served(
    now: Deployment, event: Started | Removed | Passed | Worse | Committed | NotCommitted
) -> tuple[Deployment, tuple[Action, ...]]:
    serves, actions = now.serves, list[Action]()
    # Of a commit that succeeds or fails later, a newer delivery hides the news.
    is_news = isinstance(now.delivery, Settled) or not getattr(serves, "is_late", False)
    match event, serves:
        case Started(digest), _:
            now = Deployment(Serving(digest) if digest else Absent())
            actions += [_report(GOOD, digest)] if digest else []
        case Removed(), _:
            now = Deployment()
            actions += [Action("unload"), Action("forget")]
        case Passed(digest), OnTrial(tried) if digest == tried:
            now = replace(now, serves=Serving(digest, is_kept=False))
            actions += [Action("commit", digest)]
        case Worse(digest, reason), OnTrial(tried, before) if digest == tried:
            # First the quarantine: a process killed after it must not serve the content again.
            actions += [Action("quarantine", digest, reason), Action("publish", before.digest)]
            actions += [_report(ROLLED_BACK, digest, reason)]
            is_newest = isinstance(now.delivery, Settled)
            now = Deployment(before, Quarantined(digest, reason) if is_newest else now.delivery)
        case Committed(digest), Serving(served, False) if digest == served:
            actions += [_report(GOOD, digest)] if is_news else []
            now = replace(now, serves=Serving(digest))
        case NotCommitted(digest, reason), Serving(served, False) if digest == served:
            text = f"a restart would not serve it: {reason}"
            actions += [_report(WAITS, digest, text)] if is_news else []
            now = replace(now, serves=replace(serves, is_late=True))
    return now, tuple(actions)


def _staged(
    now: Deployment, event: Copied | NotCopied | Held
) -> tuple[Deployment, tuple[Action, ...]]:
    match event:
        case Copied(digest) if digest == now.serves.digest:
            # Touched, moved or copied again: its verdict is reported again.
            is_good = isinstance(now.serves, Serving) and now.serves.is_kept
            outcome = GOOD if is_good else ON_TRIAL
            return replace(now, delivery=Settled()), (_report(outcome, digest),)
        case Copied(digest):
            actions = _report(LOADING, digest), Action("load", digest)
            return replace(now, delivery=Loading(digest)), actions
        case Held(digest, reason):
            held = Quarantined(digest, reason)
            return replace(now, delivery=held), (_report(REFUSED, digest, reason),)
        case NotCopied(reason, passes):
            return _failed(now, "", reason, passes=passes)
    return now, ()


def _load_ended(
    now: Deployment, event: Loaded | NotLoaded
) -> tuple[Deployment, tuple[Action, ...]]:
    digest = event.digest
    if now.delivery != Loading(digest):
        return now, (Action("discard", digest),) if isinstance(event, Loaded) else ()
    if isinstance(event, NotLoaded):
        return _failed(now, digest, event.reason, passes=event.passes)
    if isinstance(now.serves, Absent):
        first = Serving(digest, is_kept=False)
        return Deployment(first), (Action("publish", digest), Action("commit", digest))
    # The last version that passed stays the one to compare with.
    before = now.serves.before if isinstance(now.serves, OnTrial) else now.serves
    return Deployment(OnTrial(digest, before)), (
        Action("publish", digest),
        Action("watch", digest),
        _report(ON_TRIAL, digest),
    )


def _failed(
    now: Deployment, digest: str, reason: str, *, passes: bool
) -> tuple[Deployment, tuple[Action, ...]]:
    failed = Waiting(digest, reason) if passes else Failed(digest, reason)
    outcome = WAITS if passes else REFUSED
    return replace(now, delivery=failed), (_report(outcome, digest, reason),)


def _retried(now: Deployment) -> tuple[Deployment, tuple[Action, ...]]:
    commit: tuple[Action, ...] = ()
    if isinstance(now.serves, Serving) and not now.serves.is_kept:
        commit = (Action("commit", now.serves.digest),)
    match now.delivery:
        case Waiting(""):
            return replace(now, delivery=Staging()), (*commit, Action("stage"))
        case Waiting(digest):
            return replace(now, delivery=Loading(digest)), (*commit, Action("load", digest))
    return now, commit


def _report(outcome: str, digest: str, reason: str = "") -> Action:
    return Action("report", digest, outcome, reason)
