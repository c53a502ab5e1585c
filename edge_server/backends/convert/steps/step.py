"""The frame of a step: reads a job, calls a function, reports progress, result or error."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class StepError(Exception):
    """The step cannot be done; the text names the cause and the remedy."""


def run_command_line(
    main: Callable[[], object], words: Sequence[str], places: Mapping[str, str]
) -> None:
    """Run a converter's own command line in this process.

    Args:
        main: reads `sys.argv`.
        words: the program's name and its arguments.
        places: what stands for some of these → the path.
    """
    before = sys.argv
    sys.argv = [places.get(each, each) for each in words]
    try:
        main()
    finally:
        sys.argv = before


class Reporter:
    """Sends lines of JSON to the process that has started this one."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def progress(self, text: str) -> None:
        self.send("progress", text)

    def send(self, kind: str, value: object) -> None:
        print(json.dumps([kind, value]), file=self._file, flush=True)


def main(descriptor: int) -> None:
    """Run the job on standard input, `{"module", "function", "arguments"}`, and end this process.

    No destructor runs at the end: those of frameworks may crash, which is no failure of the job.
    """
    reporter = Reporter(descriptor)
    job: dict[str, Any] = json.load(sys.stdin)
    code = 1
    try:
        module = importlib.import_module(f".{job['module']}", __package__)
        result = getattr(module, job["function"])(reporter.progress, **job["arguments"])
        reporter.send("result", result)
        code = 0
    except StepError as error:
        reporter.send("error", str(error))
    except BaseException as error:  # noqa: BLE001 - reported to the process that waits for it
        traceback.print_exc()
        lines = traceback.format_exception_only(error)[-1].strip().splitlines()
        reporter.send("error", lines[0] if lines else type(error).__name__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
