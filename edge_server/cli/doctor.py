"""`edge-server doctor`: its report."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_server.board.board import JETPACKS
from edge_server.board.doctor.examination import examine
from edge_server.board.doctor.hardware import Level
from edge_server.cli.tables import table
from edge_server.cli.verbs import FAILED, OK

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from edge_server.board.doctor.examination import Examination

_MARKS = MappingProxyType({Level.OK: "✔", Level.WARNING: "‼", Level.FAULT: "✘"})
_COLOURS = MappingProxyType({Level.OK: "32", Level.WARNING: "33", Level.FAULT: "31"})
# JetPack 7.0 and 7.1.
_THOR_ONLY = 38
_NVDLA = MappingProxyType(
    {"yes": "AGX, NX", "no": "no", "agx": "AGX, with TensorRT 11.4.1 or newer"}
)


def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; return the exit code."""
    if arguments.matrix:
        print("\n".join(matrix()))
        return OK
    examination = examine(arguments.config)
    if arguments.json:
        print(as_json(examination))
    else:
        marks = sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf")
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        for line in text(examination, marks=marks, colour=sys.stdout.isatty() and not plain):
            print(line)
    return FAILED if examination.count(Level.FAULT) else OK


def text(examination: Examination, *, marks: bool, colour: bool) -> Iterator[str]:
    """Yield a line for each check, a line for its remedy if it has one, and the summary.

    Args:
        marks: show the levels as ✔, ‼ and ✘ instead of words.
        colour: colour the levels with terminal codes.
    """
    evidence = examination.evidence
    kernel = evidence.board.kernel or "?"
    yield f"edge-server {evidence.version}, Python {evidence.python}, Linux {kernel}"
    width = max(map(len, examination.findings))
    for name, finding in examination.findings.items():
        level = _MARKS[finding.level] if marks else f"{finding.level.value:7}"
        if colour:
            level = f"\x1b[{_COLOURS[finding.level]}m{level}\x1b[0m"
        yield f"{level} {name:{width}}  {finding.found}"
        if finding.remedy:
            indent = " " * (width + (4 if marks else 10))
            yield f"{indent}{'→' if marks else '->'} {finding.remedy}"
    faults, warnings = (_counted(examination, level) for level in (Level.FAULT, Level.WARNING))
    account = evidence.board.account.name
    yield f"{faults}, {warnings}; rights are those of user {account}"


def as_json(examination: Examination) -> str:
    """Return one object: `ok`, the checks, the board's facts, and the results of the probes."""
    evidence = examination.evidence
    checks = [
        {
            "name": name,
            "level": finding.level.value,
            "found": finding.found,
            "remedy": finding.remedy,
        }
        for name, finding in examination.findings.items()
    ]
    report = {
        "edge_server": evidence.version,
        "python": evidence.python,
        "ok": not examination.count(Level.FAULT),
        "checks": checks,
        "board": asdict(evidence.board),
        "disk": None if evidence.disk is None else asdict(evidence.disk),
        "probes": {
            name: {"says": result.facts, "trouble": result.failure}
            for name, result in evidence.results.items()
        },
    }
    return json.dumps(report, indent=2, default=_plain)


def matrix() -> Iterator[str]:
    """Yield the contents of each JetPack, and the Orin modules on which NVDLA is usable there."""
    rows: list[tuple[str, ...]] = [("JetPack", "L4T", "CUDA", "TensorRT", "Python", "Orin NVDLA")]
    for each in JETPACKS:
        nvdla = "for Thor only" if each.since.major == _THOR_ONLY else _NVDLA[each.nvdla]
        rows.append((each.version, str(each.since), each.cuda, each.tensorrt, each.python, nvdla))
    yield from table(rows, left=range(len(rows[0])))
    yield "L4T is the first one of a JetPack. From NVIDIA's release notes, not seen on boards."


def _counted(examination: Examination, level: Level) -> str:
    count = examination.count(level)
    return f"{count} {level.value}{'' if count == 1 else 's'}"


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{value!r} is of no JSON type")
