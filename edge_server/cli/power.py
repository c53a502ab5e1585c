"""`edge-server power apply`: a Jetson's power mode and clocks, by nvpmodel and jetson_clocks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edge_server.board.facts import PowerMode, read_power_modes
from edge_server.errors import SettingsError, Unavailable
from edge_server.settings import read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_TIMEOUT_S = 45
Clocks = Literal["auto", "max"]
# Runs a command without input; its exit code, and all that it printed.
RunCommand = Callable[[Sequence[str]], tuple[int, str]]

NVPMODEL = "/usr/sbin/nvpmodel"
JETSON_CLOCKS = "/usr/bin/jetson_clocks"
# `nvpmodel -q`: NV Power Mode: MAXN, and the number on a line of its own.
_CURRENT = re.compile(r"^NV Power Mode: *(\S+)\s+(\d+)\s*$", re.MULTILINE)
# nvpmodel asks whether to reboot where the mode switches parts of the GPU that was used already.
_REBOOT = re.compile(r"reboot", re.IGNORECASE)


@dataclass(frozen=True)
class PowerControl:
    """The power mode and the clocks of the board below `root`.

    Attributes:
        run: runs nvpmodel and jetson_clocks; it needs root's rights.
        kept_clocks: a file that holds the clocks as they were before `max`, until the next boot.
    """

    root: Path
    run: RunCommand
    kept_clocks: Path

    def apply(self, mode: str | None, clocks: Clocks | None) -> Iterator[str]:
        """Set what is not None, and yield a line for each part.

        A mode that already applies is not set again. Nothing here reboots the board.

        Args:
            mode: its name or number.
            clocks: `max` pins CPU, GPU and memory to the highest clocks of the mode; `auto` undoes
                that, if it was done since boot, and leaves the clocks to the kernel.

        Raises:
            SettingsError: the board has no such mode.
            Unavailable: nvpmodel or jetson_clocks is missing or fails, or the mode needs a reboot.
        """
        if mode is not None:
            yield self._set_mode(mode)
        if clocks is not None:
            yield self._set_clocks(clocks)

    def _set_mode(self, name: str) -> str:
        wanted = self._mode(name)
        if self._current() == wanted.id:
            return f"power mode {wanted.name} ({wanted.id}) as before"
        # Pinned clocks would outlast the mode that they belong to.
        self._restore_clocks()
        code, printed = self.run((NVPMODEL, "-m", str(wanted.id)))
        if self._current() == wanted.id:
            return f"power mode {wanted.name} ({wanted.id}) set"
        if _REBOOT.search(printed):
            raise Unavailable(
                f"power.mode: {wanted.name} needs a reboot, and nothing reboots by itself: run "
                f"`sudo nvpmodel -m {wanted.id}` and confirm it"
            )
        raise Unavailable(f"power.mode: nvpmodel -m {wanted.id}: {_last(code, printed)}")

    def _mode(self, name: str) -> PowerMode:
        modes = read_power_modes(self.root)
        if modes is None:
            raise Unavailable(
                "power.mode: this machine has no power modes: /etc/nvpmodel.conf is missing; on a "
                "Jetson: apt install nvidia-l4t-nvpmodel; elsewhere take [power] out"
            )
        for each in modes.known:
            if name.casefold() in (each.name.casefold(), str(each.id)):
                return each
        known = ", ".join(f"{each.name} ({each.id})" for each in modes.known)
        raise SettingsError(f"power.mode: this board has no mode '{name}'; it has: {known}")

    def _current(self) -> int:
        code, printed = self.run((NVPMODEL, "-q"))
        found = _CURRENT.search(printed)
        if found is None:
            raise Unavailable(f"power.mode: nvpmodel -q: {_last(code, printed)}")
        return int(found[2])

    def _set_clocks(self, clocks: Clocks) -> str:
        if clocks == "auto":
            return "clocks restored" if self._restore_clocks() else "clocks as the kernel sets them"
        if not self.kept_clocks.exists():
            self._jetson_clocks("--store", str(self.kept_clocks))
        self._jetson_clocks()
        return "clocks at their highest"

    def _restore_clocks(self) -> bool:
        if not self.kept_clocks.exists():
            return False
        self._jetson_clocks("--restore", str(self.kept_clocks))
        self.kept_clocks.unlink(missing_ok=True)
        return True

    def _jetson_clocks(self, *arguments: str) -> None:
        code, printed = self.run((JETSON_CLOCKS, *arguments))
        if code:
            raise Unavailable(f"power.clocks: jetson_clocks: {_last(code, printed)}")


def _last(code: int, printed: str) -> str:
    lines = printed.strip().splitlines()
    return f"ended with {code}: {lines[-1] if lines else 'printed nothing'}"


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
