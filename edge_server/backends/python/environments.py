"""Packages that a Python model brings along: an environment of conda-pack, or a requirements.txt
beside its file, of which `edge-server models env` makes a directory of packages.

The model's interpreter imports them before its own packages, and only once the sandbox is closed.
That interpreter is the daemon's own, or one that the settings name: one that comes with a model
would run before the sandbox is closed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NamedTuple

from edge_server.backends.contract import NoRoom
from edge_server.board.installation import remedy
from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import reading
from edge_server.process.child import ChildFailed, examined
from edge_server.process.disk import (
    file_sha256,
    floor_bytes,
    free_bytes,
    lock_directory,
    make_locked_directory,
    orphans,
    state_directory,
)
from edge_server.process.in_child import missing
from edge_server.process.threads import LOOK_S, require_wanted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

EXECUTION_ENV_PATH = "EXECUTION_ENV_PATH"
REQUIREMENTS = "requirements.txt"
_OF_THE_MODEL = "$$TRITON_MODEL_DIRECTORY"
_UNPACKING = "unpacking-"
_DIGITS = 32
# What was unpacked and has not been loaded for so long, and is not in use, is removed before
# something else is unpacked: it can be unpacked again.
_UNUSED_S = 30 * 24 * 3600.0
_EXAMINE_TIMEOUT_S = 30.0
_LONGEST_WORDS_BYTES = 4096
_NO_FAULT = "tar: Removing leading"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class Environment(NamedTuple):
    """Directories: the environment, which the model may read, and the packages in it; empty where
    the model has none."""

    root: str = ""
    packages: str = ""


NO_ENVIRONMENT = Environment()


class Interpreter(NamedTuple):
    """A Python that runs models, of a version like 3.11; an empty path is the daemon's own."""

    path: str = ""
    version: str = VERSION


def interpreter_of(config: ModelConfig, needs: Mapping[str, str]) -> Interpreter:
    """Return the Python that the settings have for the model. `needs`: module → what pip installs
    for it, beside what every model's process needs. Raises ModelConfigError where it does not
    start, or lacks a module."""
    python = config.completion.python.interpreter_of(config.name, config.backend)
    modules = [*needs, *("msgspec", "numpy") * bool(python)]
    interpreter, absent = examined_interpreter(python, modules, config.name)
    if absent:
        packages = " ".join(needs.get(each, each) for each in absent)
        how = f"{python} -m pip install {packages}" if python else remedy(absent[0])
        raise ModelConfigError(
            f"model '{config.name}' needs {packages}, which {python or sys.executable} has not: "
            f"{how}"
        )
    return interpreter


def examined_interpreter(
    python: str, modules: Sequence[str], model: str
) -> tuple[Interpreter, list[str]]:
    """Return the Python `python` of the settings, and which of the modules it cannot import. Raises
    ModelConfigError where it does not start."""
    if not python:
        return Interpreter(), missing(modules)
    try:
        version, absent = examined(python, modules, _EXAMINE_TIMEOUT_S)
    except (OSError, ChildFailed) as error:
        raise ModelConfigError(
            f"model '{model}': [python] interpreters or model_interpreters: {python} is no Python "
            f"that runs models: {error}"
        ) from error
    return Interpreter(python, version), absent


def environment_of(
    directory: Path, config: ModelConfig, interpreter: Interpreter, *, warn: bool = False
) -> Environment:
    """Return the environment of the model whose version `directory` is; an archive is unpacked
    where that has not been done. Raises ModelConfigError where it is for another Python, or cannot
    be read; NoRoom where the disk has too little for it; GivenUp."""
    if given := config.parameters.get(EXECUTION_ENV_PATH):
        path = Path(given.replace(_OF_THE_MODEL, str(directory.parent.resolve())))
        where = f"model '{config.name}': parameters: {EXECUTION_ENV_PATH}: {path}"
        with reading(path):
            if not path.is_absolute() or not path.exists():
                raise ModelConfigError(
                    f"{where}: is not there; give an absolute path, or begin it with "
                    f"{_OF_THE_MODEL}"
                )
            root = path if path.is_dir() else _unpacked(path, where)
            return _of_conda(root, where, interpreter.version)
    requirements = directory / REQUIREMENTS
    with reading(requirements):
        if not requirements.is_file():
            return NO_ENVIRONMENT
        made = made_of(requirements, environments_in(state_directory()), interpreter.version)
    if made.is_dir():
        return Environment(str(made), str(made))
    if warn:
        log.warning(
            "model %s: runs with its interpreter's own packages: nothing has been made of its %s; "
            "`edge-server models env` with the model's directory does that",
            config.name,
            REQUIREMENTS,
        )
    return NO_ENVIRONMENT


def environments_in(state: Path) -> Path:
    """Return where a daemon with this state directory has the environments of its models."""
    return state / "environments"


def made_of(requirements: Path, parent: Path, version: str) -> Path:
    """Return the directory below `parent` with the packages of `requirements`, once it is made: by
    its content, the version of Python and the machine."""
    content = f"{version} {platform.machine()}\n".encode() + requirements.read_bytes()
    return parent / hashlib.sha256(content).hexdigest()[:_DIGITS]


def _of_conda(root: Path, where: str, version: str) -> Environment:
    packages = root / "lib" / f"python{version}" / "site-packages"
    if packages.is_dir():
        return Environment(str(root), str(packages))
    found = sorted(path.name for path in (root / "lib").glob("python3*") if path.is_dir())
    raise ModelConfigError(
        f"{where}: has {' and '.join(found) or 'no Python'} in lib, and the model runs with Python "
        f"{version}; make it with `conda create python={version}` and conda-pack, or name a Python "
        "of its version in [python] model_interpreters"
    )


def _unpacked(archive: Path, where: str) -> Path:
    """Return the directory of the archive's content, by its digest."""
    parent = environments_in(state_directory())
    place = parent / file_sha256(archive)[:_DIGITS]
    if place.is_dir():
        with suppress(OSError):
            os.utime(place)
        return place
    try:
        parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _set_unused_aside(parent)
        for orphan, _ in orphans(parent, _UNPACKING):
            shutil.rmtree(orphan, ignore_errors=True)
        made, held = make_locked_directory(parent, _UNPACKING)
    except OSError as error:
        raise ModelLoadError(f"{where}: cannot be unpacked: {error}") from error
    try:
        log.info("%s: is unpacked into %s", where, place)
        _unpack(archive, made, where)
        os.utime(made)
        # A load beside this one may have been first.
        if not place.is_dir():
            made.rename(place)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)
    return place


def _set_unused_aside(parent: Path) -> None:
    """Make orphans of the archives' contents that nothing uses."""
    for packages in parent.glob("*/lib/python3*/site-packages"):
        place = packages.parents[2]
        with suppress(OSError):
            # A process of a model holds its packages.
            lock = lock_directory(packages)
            try:
                if time.time() - place.stat().st_mtime > _UNUSED_S:
                    log.info("%s: is removed: no model has loaded it for 30 days", place)
                    place.rename(place.with_name(f"{_UNPACKING}{place.name}"))
            finally:
                os.close(lock)


def _unpack(archive: Path, directory: Path, where: str) -> None:
    """A program of its own does it: an archive has many small files, and Python's lock is held for
    each of them."""
    command = ["nice", "tar", "-x", "--no-same-owner", "-f", str(archive), "-C", str(directory)]
    parent, room = directory.parent, _room_bytes(directory)
    if room < (least := archive.stat().st_size):
        raise _no_room(parent, where, least)
    # A short archive may have any number of faults, and unpack to more than the disk has.
    with ExitStack() as stack:
        said = stack.enter_context(TemporaryFile(dir=directory))
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=said)  # noqa: S603 - a fixed program
        )
        stack.callback(process.kill)
        while process.poll() is None:
            require_wanted()
            if _room_bytes(directory) < 0:
                # Space that comes and goes must not let it be written again and again; but what
                # took it may be the files of others.
                most = shutil.disk_usage(directory).total - floor_bytes(directory)
                raise _no_room(parent, where, max(least, min(room + room // 8, most * 7 // 8)))
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        said.seek(0)
        lines = said.read(_LONGEST_WORDS_BYTES).decode(errors="replace").splitlines()
    if process.returncode:
        # The last line says that there were others.
        faults = (line for line in lines if not line.startswith(_NO_FAULT))
        first = next(faults, f"tar ended with code {process.returncode}")
        raise ModelConfigError(f"{where}: cannot be unpacked: {first}; make it with conda-pack")


def _room_bytes(directory: Path) -> int:
    return free_bytes(directory) - floor_bytes(directory)


def _no_room(parent: Path, where: str, needed_bytes: int) -> NoRoom:
    def has_room() -> bool:
        with suppress(OSError):
            return _room_bytes(parent) >= needed_bytes
        return True  # the next attempt says what is wrong

    left = free_bytes(parent)
    return NoRoom(
        f"{where}: cannot be unpacked: the disk of {parent} has {left} bytes left, of which "
        f"{floor_bytes(parent)} stay free; make room there, or bring less",
        has_room,
    )
