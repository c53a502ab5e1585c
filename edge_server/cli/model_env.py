"""`edge-server models env`: makes what a Python model's requirements.txt names."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.python.environments import (
    REQUIREMENTS,
    Interpreter,
    environments_in,
    examined_interpreter,
    made_of,
)
from edge_server.cli.run import settings_of
from edge_server.cli.verbs import FAILED, OK
from edge_server.errors import ModelConfigError, SettingsError, Unsupported
from edge_server.process.disk import installed_state

if TYPE_CHECKING:
    import argparse


def make_environments(arguments: argparse.Namespace) -> int:
    """Make a directory of packages for each version's requirements.txt that has none yet."""
    model: Path = arguments.dir
    found = sorted(path for path in model.glob(f"*/{REQUIREMENTS}") if path.parent.name.isdecimal())
    if not found:
        raise ModelConfigError(f"{model}: no version has a {REQUIREMENTS} beside its model.py")
    name = model.resolve().name
    python = settings_of(arguments).python.interpreter_of(name, "python")
    interpreter, absent = examined_interpreter(python, ["pip"], name)
    if absent:
        how = f"{python} -m ensurepip" if python else "sudo apt install python3-pip"
        raise Unsupported(f"{python or sys.executable} has no pip: {how}")
    state = arguments.to or installed_state()
    try:
        parent = _parent(state)
        return max(_make(requirements, parent, interpreter) for requirements in found)
    except OSError as error:
        raise SettingsError(f"{error.filename or state}: {error.strerror}") from error


def _parent(state: Path) -> Path:
    """Return the directory of all environments, which belongs to the user of the state."""
    parent = environments_in(state)
    parent.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        owner = state.stat()
        os.chown(parent, owner.st_uid, owner.st_gid)
    return parent


def _make(requirements: Path, parent: Path, interpreter: Interpreter) -> int:
    place = made_of(requirements, parent, interpreter.version)
    if place.is_dir():
        print(f"{requirements}: {place} is made of it already")
        return OK
    with tempfile.TemporaryDirectory(prefix=".making-", dir=parent) as folder:
        made = Path(folder) / "packages"
        pip = [interpreter.path or sys.executable, "-m", "pip", "install", "--target", str(made)]
        # Paths in a requirements.txt are relative to where pip runs.
        command = [*pip, "--requirement", REQUIREMENTS]
        if subprocess.run(command, cwd=requirements.parent, check=False).returncode:  # noqa: S603
            return FAILED
        made.mkdir(exist_ok=True)  # of an empty list
        made.rename(place)
    print(f"{requirements}: {place} is made of it; models load it from now on")
    return OK
