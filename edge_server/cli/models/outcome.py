"""Shows the progress and the result of a transfer, and what the daemon makes of the model."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from edge_server.cli.exit_codes import FAILED, OK, UNAVAILABLE
from edge_server.errors import SettingsError
from edge_server.repository.verdicts import (
    ENDED,
    GOOD,
    NOBODY,
    ON_TRIAL,
    REPLACED,
    SILENT,
    WAITS,
    wait_for,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from edge_server.repository.transfer import Delivery
    from edge_server.repository.verdicts import Verdict

NOT_YET = 75

_LARGE_BYTES = 16 << 20
_BETWEEN_S = 0.2
_OUTCOMES = {
    "new": "new",
    "replaced": "replaced, rollback brings the former one back",
    "unchanged": "was there already, nothing changed",
}


class Progress:
    """Counts the bytes of a large copy in one line, on a terminal only; cleared at the end.

    Args:
        total_bytes: size of the whole copy; 0 if unknown.
    """

    def __init__(self, total_bytes: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = total_bytes
        self._now = now
        self._bytes = 0
        self._began = self._shown_at = self._now()
        self._shown = False

    def __call__(self, more_bytes: int) -> None:
        self._bytes += more_bytes
        now = self._now()
        is_due = self._bytes >= _LARGE_BYTES and now - self._shown_at >= _BETWEEN_S
        if not is_due or not sys.stderr.isatty():
            return
        self._shown_at, self._shown = now, True
        mib = self._bytes / (1 << 20)
        of = f" of {self._total_bytes / (1 << 20):.0f}" if self._total_bytes else ""
        print(
            f"\r\033[K{mib:.0f}{of} MiB, {mib / (now - self._began):.0f} MiB/s",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_delivery(done: Delivery, where: Path) -> None:
    print(f"{done.name}: {done.content.digest[:12]} in {where}: {_OUTCOMES[done.outcome]}")
    if done.note:
        print(f"note: {done.note}")


def await_verdict(
    repository: Path,
    name: str,
    digest: str,
    since_ns: int,
    arguments: argparse.Namespace,
) -> int:
    """Wait for the daemon's verdict as `arguments` require and print it; return the exit code.

    Unless `arguments` require a verdict, an unreachable daemon is no failure.
    """
    if arguments.no_wait:
        return OK
    insists = arguments.wait or arguments.until_passed
    timeout_s = arguments.wait_secs
    try:
        ended, verdict = wait_for(
            repository,
            name,
            digest,
            since_ns,
            passed=arguments.until_passed,
            timeout_s=timeout_s,
            store=arguments.store,
        )
    except SettingsError as error:
        if insists:
            raise
        print(f"note: what the daemon makes of it is not known: {error}", file=sys.stderr)
        return OK
    if ended == NOBODY and not insists:
        return OK
    text, code = _in_words(ended, verdict, repository, timeout_s)
    if code == OK:
        print(f"{name}: {digest[:12]} {text}")
    else:
        print(f"edge-server: {name}: {text}", file=sys.stderr)
    return code


def _in_words(ended: str, verdict: Verdict, repository: Path, timeout_s: float) -> tuple[str, int]:
    """Return the text and the exit code of a verdict."""
    undecided = {
        NOBODY: (
            f"no daemon that runs there follows {repository}; start one in mode poll, or name its "
            "store with --store",
            UNAVAILABLE,
        ),
        ENDED: ("the daemon ended before it decided on it", UNAVAILABLE),
        REPLACED: (
            f"{repository} no longer holds it: another push, a rollback or a removal came before "
            f"the daemon decided on it; `edge-server models list {repository}` shows what is there",
            FAILED,
        ),
        SILENT: (
            f"the daemon has not decided on it within {timeout_s:g} s "
            f"({verdict.outcome or 'not seen yet'}); `edge-server models list {repository}` shows "
            "it later",
            NOT_YET,
        ),
    }
    if ended in undecided:
        return undecided[ended]
    if verdict.outcome == GOOD:
        return "serves", OK
    if verdict.outcome == ON_TRIAL:
        return "serves, and is watched beside what served before", OK
    serves = f"{verdict.serves[:12]} serves" if verdict.serves else "nothing of that name serves"
    return (
        f"{verdict.outcome}: {verdict.reason}; {serves}",
        NOT_YET if verdict.outcome == WAITS else FAILED,
    )
