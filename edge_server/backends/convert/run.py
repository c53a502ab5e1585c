"""Starts a step in an interpreter that has its framework, and returns its result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edge_server.backends.convert.environments import foreign_environ
from edge_server.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STEPS = Path(__file__).with_name("steps")
# The steps are a package of their own there: no directory of ours gets onto that interpreter's
# path, and neither does the working directory, whose numpy.py would be imported.
_START = """\
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.spec_from_file_location(
    "edge_server_steps", {init!r}, submodule_search_locations=[{folder!r}]
)
package = importlib.util.module_from_spec(spec)
sys.modules["edge_server_steps"] = package
spec.loader.exec_module(package)
from edge_server_steps.step import main
main({events})
"""
# Quiet libraries: their notes on start are of no use here, and one of them sends telemetry.
_QUIET = {
    "ORT_DISABLE_TELEMETRY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
_LAST_LINES = 5


def run_step(
    python: Path,
    step: tuple[str, str],
    arguments: Mapping[str, Any],
    progress: Callable[[str], None],
    *,
    verbose: bool,
) -> dict[str, Any]:
    """Run a function of `steps` with `arguments` in `python`; return its result.

    Args:
        python: the interpreter; if another than this one, it imports nothing of this one's.
        step: the module and the function.
        arguments: what JSON can carry.
        progress: called with the text of each step.
        verbose: show what the framework prints.

    Raises:
        InvalidRequest: the step says why it cannot be done.
        InternalError: the process ended otherwise; with its last words.
    """
    module, function = step
    job = json.dumps({"module": module, "function": function, "arguments": dict(arguments)})
    is_ours = python == Path(sys.executable)
    environ = {**(dict(os.environ) if is_ours else foreign_environ()), **_QUIET}
    reading, writing = os.pipe()
    start = _START.format(init=str(_STEPS / "__init__.py"), folder=str(_STEPS), events=writing)
    with (
        tempfile.TemporaryFile() as log,
        os.fdopen(reading, encoding="utf-8") as events,
        os.fdopen(writing, "wb") as their_end,
        subprocess.Popen(  # noqa: S603 - our own code, in an interpreter that the user chooses
            [python, "-c", start],
            stdin=subprocess.PIPE,
            stdout=None if verbose else log,
            stderr=None if verbose else log,
            pass_fds=(writing,),
            env=environ,
        ) as process,
    ):
        their_end.close()
        try:
            assert process.stdin is not None  # noqa: S101 - it was asked for
            # One that dies at once is reported below.
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(job.encode())
            for line in events:
                kind, value = json.loads(line)
                if kind == "progress":
                    progress(value)
                elif kind == "result":
                    return dict(value)
                else:
                    hint = "" if verbose else _hint(log)
                    raise InvalidRequest(f"{value}{hint}")  # noqa: TRY301 - ends the process, too
        except BaseException:
            process.kill()
            raise
        process.wait()
        raise InternalError(f"{module}.{function}: {_ending(process.returncode)}{_words(log)}")


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed: most likely for want of memory"
    return f"the process ended with {code} and without a result"


def _hint(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    return "; --verbose shows all that the framework printed" if log.tell() else ""


def _words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    return f": {' '.join(lines)}" if lines else ""
