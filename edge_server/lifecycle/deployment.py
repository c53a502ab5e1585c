"""The deployment of one model in mode POLL: its states, and what each event makes of them.

`step` is pure: it has no clock, lock, thread or file. docs/deployment_states.md is its table, and a
test drives it beside `updates`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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


EventKind = Literal[
    "started",
    "removed",
    "changed",
    "copied",
    "not copied",
    "held",
    "loaded",
    "not loaded",
    "passed",
    "worse",
    "committed",
    "not committed",
    "released",
    "due",
]


@dataclass(frozen=True)
class Event:
    """What has happened to the model, or to its content `digest`.

    Attributes:
        kind: `held` is content that is in quarantine; `due` is a retry after its pause, once the
            board has what the last attempt lacked.
        digest: of `started` the last known good copy, empty without one.
        may_pass: the same files may be copied, or loaded, later.
    """

    kind: EventKind
    digest: str = ""
    reason: str = ""
    may_pass: bool = False


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
    if event.kind in ("started", "removed", "passed", "worse", "committed", "not committed"):
        return _served(now, event)
    match event, now.delivery:
        case Event("changed"), _:
            return replace(now, delivery=Staging()), (Action("stage"),)
        case Event("released", digest), Quarantined(held) if digest == held:
            return replace(now, delivery=Staging()), (Action("stage"),)
        case Event("copied" | "not copied" | "held"), Staging():
            return _staged(now, event)
        case Event("loaded" | "not loaded"), _:
            return _load_ended(now, event)
    return _retried(now) if event.kind == "due" else (now, ())


def _served(now: Deployment, event: Event) -> tuple[Deployment, tuple[Action, ...]]:
    serves, digest, reason, actions = now.serves, event.digest, event.reason, list[Action]()
    # Of a commit that succeeds or fails later, a newer delivery hides the news.
    is_news = isinstance(now.delivery, Settled) or not getattr(serves, "is_late", False)
    match event.kind, serves:
        case "started", _:
            now = Deployment(Serving(digest) if digest else Absent())
            actions += [_report(GOOD, digest)] if digest else []
        case "removed", _:
            now = Deployment()
            actions += [Action("unload"), Action("forget")]
        case "passed", OnTrial(tried) if digest == tried:
            now = replace(now, serves=Serving(digest, is_kept=False))
            actions += [Action("commit", digest)]
        case "worse", OnTrial(tried, before) if digest == tried:
            # First the quarantine: a process killed after it must not serve the content again.
            actions += [Action("quarantine", digest, reason), Action("publish", before.digest)]
            actions += [_report(ROLLED_BACK, digest, reason)]
            is_newest = isinstance(now.delivery, Settled)
            now = Deployment(before, Quarantined(digest, reason) if is_newest else now.delivery)
        case "committed", Serving(served, False) if digest == served:
            actions += [_report(GOOD, digest)] if is_news else []
            now = replace(now, serves=Serving(digest))
        case "not committed", Serving(served, False) if digest == served:
            text = f"a restart would not serve it: {reason}"
            actions += [_report(WAITS, digest, text)] if is_news else []
            now = replace(now, serves=replace(serves, is_late=True))
    return now, tuple(actions)


def _staged(now: Deployment, event: Event) -> tuple[Deployment, tuple[Action, ...]]:
    digest = event.digest
    if event.kind == "not copied":
        return _failed(now, event)
    if event.kind == "held":
        held = Quarantined(digest, event.reason)
        return replace(now, delivery=held), (_report(REFUSED, digest, event.reason),)
    if digest == now.serves.digest:
        # Touched, moved or copied again: its verdict is reported again.
        is_good = isinstance(now.serves, Serving) and now.serves.is_kept
        outcome = GOOD if is_good else ON_TRIAL
        return replace(now, delivery=Settled()), (_report(outcome, digest),)
    return replace(now, delivery=Loading(digest)), (
        _report(LOADING, digest),
        Action("load", digest),
    )


def _load_ended(now: Deployment, event: Event) -> tuple[Deployment, tuple[Action, ...]]:
    digest = event.digest
    if now.delivery != Loading(digest):
        return now, (Action("discard", digest),) if event.kind == "loaded" else ()
    if event.kind == "not loaded":
        return _failed(now, event)
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


def _failed(now: Deployment, event: Event) -> tuple[Deployment, tuple[Action, ...]]:
    digest, reason = event.digest, event.reason
    failed = Waiting(digest, reason) if event.may_pass else Failed(digest, reason)
    outcome = WAITS if event.may_pass else REFUSED
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
