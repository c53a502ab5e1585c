"""`edge-server power apply`: the power mode and the clocks that the settings want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.power import PowerControl
from edge_server.errors import Unavailable
from edge_server.settings import read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

_TIMEOUT_S = 45


def apply(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each change."""
    power = read_settings(arguments.config, {}).power
    if power.mode is None and power.clocks is None:
        yield "power: the settings leave mode and clocks as they are"
        return
    folder = Path(os.environ.get("RUNTIME_DIRECTORY", "/run/edge_server_power"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(
            f"{folder}: cannot be made: {error.strerror}; power modes are root's: run it with sudo"
        ) from error
    control = PowerControl(Path("/"), _run, folder / "clocks")
    for line in control.apply(None if power.mode is None else str(power.mode), power.clocks):
        yield f"power: {line}"


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Without input, a question is a no."""
    try:
        done = subprocess.run(  # noqa: S603 - NVIDIA's own programs, by their full paths
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is missing"
    except PermissionError as error:
        return 126, f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, f"gave no result within {_TIMEOUT_S} s"
    print(done.stdout, end="", file=sys.stderr)
    return done.returncode, done.stdout
