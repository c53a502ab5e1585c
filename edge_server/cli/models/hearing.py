"""Waits for the daemon's verdict on a delivered model, and prints it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from edge_server.cli.verbs import FAILED, OK
from edge_server.errors import SettingsError
from edge_server.repository.transfer.verdict import (
    ENDED,
    NOBODY,
    REPLACED,
    SILENT,
    Wanted,
    in_words,
)
from edge_server.repository.verdicts import GOOD, ON_TRIAL, WAITS

if TYPE_CHECKING:
    import argparse

    from edge_server.cli.models.push import Repository
    from edge_server.repository.verdicts import Verdict

UNAVAILABLE = 69
NOT_YET = 75


def hear(
    repository: Repository,
    name: str,
    digest: str,
    since_ns: int,
    arguments: argparse.Namespace,
) -> int:
    """Wait for the daemon's verdict as `arguments` require; return the exit code.

    Unless `arguments` require a verdict, an unreachable daemon is no failure.
    """
    if arguments.no_wait:
        return OK
    insists = arguments.wait or arguments.until_passed
    store = str(arguments.store or "")
    wanted = Wanted(name, digest, since_ns, arguments.until_passed, arguments.wait_secs, store)
    try:
        ended, verdict = repository.wait_for(wanted)
    except SettingsError as error:
        if insists:
            raise
        print(f"note: what the daemon says of it is not known: {error}", file=sys.stderr)
        return OK
    if ended == NOBODY and not insists:
        return OK
    text, code = _told(ended, verdict, repository, arguments.wait_secs)
    if code == OK:
        print(f"{name}: {digest[:12]} {text}")
    else:
        print(f"edge-server: {name}: {text}", file=sys.stderr)
    return code


def _told(
    ended: str, verdict: Verdict, repository: Repository, patience_s: float
) -> tuple[str, int]:
    """Return the text and the exit code of a verdict."""
    if ended == NOBODY:
        return (
            f"no daemon that runs there follows {repository}; start one in mode poll, or name its "
            "store with --store",
            UNAVAILABLE,
        )
    if ended == ENDED:
        return "the daemon ended before it said what became of it", UNAVAILABLE
    if ended == REPLACED:
        return (
            f"{repository} no longer holds it: another push, a rollback or a removal came before "
            "the daemon said what became of it; `edge-server models list` tells what is there",
            FAILED,
        )
    if ended == SILENT:
        return (
            f"the daemon has not said what became of it within {patience_s:g} s "
            f"({verdict.outcome or 'not seen yet'}); `edge-server models list` tells later",
            NOT_YET,
        )
    words = {GOOD: "serves", ON_TRIAL: "serves, and is watched beside what served before"}
    if verdict.outcome in words:
        return words[verdict.outcome], OK
    return in_words(verdict), NOT_YET if verdict.outcome == WAITS else FAILED
