"""The frame of a section of `gpu_report`: its flags, its findings as JSON, and how it ends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edge_server.errors import EdgeServerError, Unavailable
from edge_server.gpu.device import Devices

NOT_POSSIBLE = 69

Measure = Callable[[Devices, bool], Iterator[dict[str, Any]]]


def run_section(program: str, about: str, measure: Measure) -> int:
    """Run one section as its command line asks; the exit code.

    Args:
        program: what its errors begin with.
        about: its docstring, of which the first line is its help.
        measure: prints for people and yields `rows`, `goals` and `notes` as they are so far: who
            has no more time has the last ones. Its second argument asks for a sketch. What it
            raises of ours is told in one line.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sketch: few repeats, small memory")
    parser.add_argument("--json", type=Path, help="write rows and goals there")
    arguments = parser.parse_args()
    devices = Devices()
    try:
        for found in measure(devices, arguments.quick):
            if arguments.json:
                atomic_write(arguments.json, json.dumps(found, indent=1))
    except EdgeServerError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return NOT_POSSIBLE if isinstance(error, Unavailable) else 1
    finally:
        devices.close()
    return 0


def atomic_write(path: Path, text: str) -> None:
    """So that nobody reads a part, also when this process is ended now."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text)
    beside.replace(path)
