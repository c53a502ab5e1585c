"""`edge-server doctor`: its flags and its report. The checks are imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.board.doctor.examination import Examination

OK = 0
FAULTY = 1
INTERRUPTED = 130

_ABOUT = """\
Looks at the board, its JetPack, GPU and NVDLA, at cameras, libraries, settings and surroundings,
and says of each whether it is well and what to do where it is not. Changes nothing. Drivers and
libraries are tried in processes of their own, so that one that crashes or hangs costs its line.
"""
_CODES = "exit codes: 0 no fault (warnings there may be), 1 at least one fault, 2 usage"


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.description, parser.epilog = _ABOUT, _CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the daemon's settings; default: /etc/edge_server/config.toml, where it is there",
    )
    parser.add_argument("--json", action="store_true", help="one object, with all facts found")
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="only tell which JetPack brings what, and where NVDLA can be used",
    )
    parser.set_defaults(verb=_doctor, flags=("--config", "--json", "--matrix"))


def _doctor(arguments: argparse.Namespace) -> int:
    from edge_server.board.doctor.examination import examine  # noqa: PLC0415
    from edge_server.board.doctor.finding import Level  # noqa: PLC0415
    from edge_server.cli.doctor.report import matrix  # noqa: PLC0415

    if arguments.matrix:
        print("\n".join(matrix()))
        return OK
    try:
        examination = examine(arguments.config)
    except KeyboardInterrupt:
        return INTERRUPTED
    _tell(examination, json=arguments.json)
    return FAULTY if examination.count(Level.FAULT) else OK


def _tell(examination: Examination, *, json: bool) -> None:
    from edge_server.cli.doctor.report import as_json, text  # noqa: PLC0415

    if json:
        print(as_json(examination))
        return
    marks = sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf")
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    for line in text(examination, marks=marks, colour=sys.stdout.isatty() and not plain):
        print(line)
