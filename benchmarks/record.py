"""Keep what a benchmark measured, for docs/figures.md.

    python benchmarks/start.py --record start

writes the values, the commit, the machine and the date into benchmarks/results/start.json.
`figures` in that file are rows of docs/figures.md, which people write: a text has the places of
values, such as `{READY_s_p50:.2f} s`. scripts/reference_pages.py makes the page of all files.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

RESULTS = Path(__file__).parent / "results"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--record NAME`, for `record`."""
    parser.add_argument("--record", metavar="NAME", help="write benchmarks/results/NAME.json")


def record(name: str | None, values: Mapping[str, float]) -> None:
    """Write the values under `name`; nothing where it is None.

    Args:
        values: by the places of the texts: a name and its unit. What is no letter or digit becomes
            an underscore.
    """
    if name is None:
        return
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"figures": []}
    made = {
        "command": _command(),
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=8", "--match="),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": _machine(),
        "values": {
            re.sub(r"\W+", "_", key): round(float(value), 4)
            for key, value in values.items()
            if not math.isnan(value)
        },
        "figures": kept["figures"],
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    print(f"kept in {path}; scripts/reference_pages.py makes docs/figures.md of it")


def _command() -> str:
    words = [Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1]).as_posix(), *sys.argv[1:]]
    return re.sub(r" --record[ =]\S+", "", shlex.join(words))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=RESULTS.parent)
    return done.stdout.strip()


def _machine() -> str:
    board = Path("/proc/device-tree/model")
    if board.exists():
        name = board.read_text().strip("\0")
    else:
        cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        name = cpu[1] if cpu else platform.machine()
    versions = f"Python {platform.python_version()}, ONNX Runtime {metadata.version('onnxruntime')}"
    return f"{os.cpu_count()} cores of {name}, {versions}"
