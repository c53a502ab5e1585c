"""Run a probe that may crash or hang (drivers, third-party libraries, networks) in its own process.

A crash or hang costs only that probe's result, and at most its time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.board.account import Account

# The first import of a large library from a slow disk takes seconds.
PATIENCE_S = 30.0
# By then a killed process has ended, or hangs in the kernel, where no signal ends it.
_KILLED_S = 1.0
# The process imports from the same paths as this one, however this one was started.
_START = (
    "import sys; sys.path[:] = {path!r}; from edge_server.board.doctor.child import main; main()"
)


@dataclass(frozen=True)
class Probe:
    """A function, as `package.module:name`, and its arguments.

    Attributes:
        account: the account that runs the process, where root probes; other users run it as
            themselves.
    """

    function: str
    arguments: tuple[str, ...] = ()
    patience_s: float = PATIENCE_S
    account: Account | None = None


@dataclass(frozen=True)
class ProbeResult:
    """The function's result, or in `trouble` the reason why it is missing."""

    says: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


def ask(question: Probe) -> ProbeResult:
    """Run the probe; return within its `patience_s` and a second; never raises.

    The process also ends itself in time, in case this process is gone by then.
    """
    command = [
        sys.executable,
        "-c",
        _START.format(path=sys.path),
        question.function,
        str(question.patience_s),
        _account(question.account),
        *question.arguments,
    ]
    try:
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return ProbeResult(trouble=f"no process for it: {error.strerror}")
    try:
        said, complained = process.communicate(timeout=question.patience_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return ProbeResult(trouble=f"no answer within {question.patience_s:g} s")
    return _answer(process.returncode, said, complained)


def _account(account: Account | None) -> str:
    if account is None or os.geteuid() != 0 or account.uid == 0:
        return ""
    return f"{account.uid}:{','.join(map(str, sorted(account.gids)))}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.communicate(timeout=_KILLED_S)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _answer(code: int, said: bytes, complained: bytes) -> ProbeResult:
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        return ProbeResult(trouble=f"the process that tried was ended by {name}")
    try:
        says = json.loads(said)
    except ValueError:
        says = None
    if code == 0 and isinstance(says, dict):
        return ProbeResult(says)
    lines = complained.decode(errors="replace").strip().splitlines()
    return ProbeResult(trouble=lines[-1] if lines else f"the process that tried ended with {code}")
