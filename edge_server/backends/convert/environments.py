"""Interpreters that have a framework: this one, one that the user names, or one made for it.

An isolated environment is a virtual environment below the user's cache directory, with packages
between tested bounds. So the packages of a framework, TensorFlow's numpy and protobuf above all,
never meet the daemon's.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import SettingsError, Unavailable
from edge_server.process.disk import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_COMPLETE = "edge-server-complete"
_LAST_LINES = 3
_PROBE = (
    "import importlib.util as u,sys;print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
)


@dataclass(frozen=True)
class FrameworkPackages:
    """Packages that a step needs together.

    Attributes:
        name: in texts and paths.
        modules: what must be importable.
        requirements: what pip installs for that, each line a call of pip.
        size_mb: of the environment, roughly.
        is_ours: the daemon uses it itself, so that this interpreter's is good enough.
    """

    name: str
    modules: tuple[str, ...]
    requirements: tuple[tuple[str, ...], ...]
    size_mb: int
    is_ours: bool = False

    @property
    def pip_lines(self) -> list[str]:
        return [f"pip install {' '.join(map(_quoted, line))}" for line in self.requirements]


# So that the environment can be one of `[python] interpreters`, too.
_TO_SERVE = "msgspec>=0.19,<1"
_IS_PC = platform.machine() == "x86_64"
# PyPI's PyTorch for PCs comes with CUDA, some gigabytes that no conversion uses. Of one version pip
# prefers the one for CPUs, 2.13.0+cpu.
_CPU_WHEELS = ("--extra-index-url", "https://download.pytorch.org/whl/cpu") if _IS_PC else ()

ONNX = FrameworkPackages(
    "onnx",
    ("onnx", "onnxruntime", "onnxsim"),
    (("onnx>=1.17,<2", "onnxruntime>=1.20,<2", "onnxsim>=0.4.36,<0.9"),),
    220,
    is_ours=True,
)
TENSORFLOW = FrameworkPackages(
    "tensorflow",
    ("tensorflow", "tf2onnx"),
    # tensorflow-cpu has no wheels for ARM, where tensorflow has no CUDA either.
    ((f"tensorflow{'-cpu' if _IS_PC else ''}>=2.18,<2.22", "tf2onnx>=1.17,<1.18", _TO_SERVE),),
    1650,
)
TORCH = FrameworkPackages(
    "torch",
    ("torch", "onnxscript", "onnx"),
    (
        (*_CPU_WHEELS, "torch>=2.6,<3"),
        ("onnx>=1.17,<2", "onnxscript>=0.5,<0.8", "numpy>=1.26,<3", _TO_SERVE),
    ),
    1100,
)
PADDLE = FrameworkPackages(
    "paddle",
    ("paddle", "paddle2onnx"),
    (("paddlepaddle>=3.2,<3.4", "paddle2onnx>=2.1,<2.2", _TO_SERVE),),
    1000,
)
OPENVINO = FrameworkPackages(
    "openvino", ("openvino",), (("openvino>=2025.0,<2027", _TO_SERVE),), 200
)


@dataclass(frozen=True)
class Interpreters:
    """Where to look for frameworks.

    Attributes:
        pythons: interpreters that the user names; asked first.
        isolated: make an environment for each framework.
        progress: called with each step.
    """

    pythons: Sequence[Path]
    isolated: bool
    progress: Callable[[str], None]

    def having(self, framework: FrameworkPackages) -> Path:
        """Return an interpreter that has `framework`.

        Raises:
            Unavailable: none has it, or none can be made.
            SettingsError: an interpreter that the user names is none.
        """
        for python in self.pythons:
            if not lacks(python, framework.modules):
                return python
        here = [name for name in framework.modules if importlib.util.find_spec(name) is None]
        if not here and (framework.is_ours or not self.isolated):
            return Path(sys.executable)
        if self.isolated:
            return make_environment(framework, environments_directory(), self.progress)
        raise Unavailable(
            f"{', '.join(here)}: not installed here; --isolated makes an environment with it, "
            f"{framework.size_mb} MB below {environments_directory()}; --python FILE names an "
            f"interpreter that has it; or: {'; '.join(framework.pip_lines)}"
        )


def environments_directory() -> Path:
    """Return the directory of isolated environments, below the user's cache directory."""
    return cache_directory() / "convert"


def make_environment(
    framework: FrameworkPackages, directory: Path, progress: Callable[[str], None]
) -> Path:
    """Return the interpreter of the environment for `framework` in `directory`; make it once.

    Other bounds, or another Python, are another environment. One that was left half made is made
    anew.

    Raises:
        Unavailable: a package cannot be installed; nothing is left.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = "\n".join(" ".join(line) for line in framework.requirements)
    digest = hashlib.sha256(lines.encode()).hexdigest()[:8]
    home = directory / f"{framework.name}-{version}-{digest}"
    python = home / "bin" / "python"
    with _locked(directory, home.name):
        if (home / _COMPLETE).exists():
            return python
        progress(f"making an environment with {framework.name}, {framework.size_mb} MB, in {home}")
        shutil.rmtree(home, ignore_errors=True)
        try:
            _call([sys.executable, "-m", "venv", str(home)], "an environment cannot be made")
            for line in framework.requirements:
                named = ", ".join(name for name in line if not name.startswith(("-", "https:")))
                progress(f"installing {named}")
                # `-m pip`: pip's own script may have a path that is too long for the kernel.
                command = [str(python), "-m", "pip", "install", "--quiet", *line]
                _call(command, f"{named} cannot be installed")
            (home / _COMPLETE).write_text(lines)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
    return python


@contextmanager
def _locked(directory: Path, name: str) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / f"{name}.lock").open("w")
    except OSError as error:
        raise Unavailable(
            f"{directory}: cannot be written: {error.strerror}; set XDG_CACHE_HOME to a directory "
            "that can"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _call(command: list[str], fault: str) -> None:
    done = subprocess.run(  # noqa: S603 - our own command, and no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=foreign_environ(),
        check=False,
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise Unavailable(f"{fault}: {' '.join(lines)}")


def foreign_environ() -> dict[str, str]:
    """Return the environment for another interpreter, which must not import this one's packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
    return {name: value for name, value in os.environ.items() if name not in ours}


def lacks(python: Path, modules: Sequence[str]) -> list[str]:
    """Return those of `modules` that `python` cannot import.

    Raises:
        SettingsError: it is no Python.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the user names
            [python, "-c", _PROBE, *modules],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=foreign_environ(),
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingsError(f"--python {python}: is no Python that starts: {error}") from error
    return done.stdout.decode().split()


def _quoted(text: str) -> str:
    return f"'{text}'" if "<" in text or ">" in text else text
