"""`edge-server power apply`: the power mode and the clocks that the settings want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.verbs import OK, Verbs
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_ABOUT = """\
The power mode (nvpmodel) and the clocks (jetson_clocks) of a Jetson, as [power] of the settings
wants them. Needs root's rights; edge-server-power.service runs it at boot.
"""
_CODES = """\
exit codes: 0 set, or nothing to set, 2 usage, 69 nvpmodel or jetson_clocks is missing or fails, or
the mode needs a reboot, 78 the settings are wrong or the board has no such mode
"""
_TIMEOUT_S = 45


def add_power(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below `power`."""
    verbs = Verbs(parser, about=_ABOUT, codes=_CODES)
    apply = verbs.add("apply", "set the power mode and the clocks of the settings", _apply)
    apply.add_argument("--config", type=Path, metavar="FILE", help="the daemon's settings")


def _apply(arguments: argparse.Namespace) -> int:
    from edge_server.board.power import PowerControl
    from edge_server.settings import read_settings

    power = read_settings(arguments.config, {}).power
    if power.mode is None and power.clocks is None:
        print("power: the settings leave mode and clocks as they are")
        return OK
    folder = Path(os.environ.get("RUNTIME_DIRECTORY", "/run/edge_server_power"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(
            f"{folder}: cannot be made: {error.strerror}; power modes are root's: run it with sudo"
        ) from error
    control = PowerControl(Path("/"), _run, folder / "clocks")
    for line in control.apply(None if power.mode is None else str(power.mode), power.clocks):
        print(f"power: {line}", flush=True)
    return OK


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
