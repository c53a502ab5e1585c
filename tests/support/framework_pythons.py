"""Interpreters that have a framework, each in an environment below the user's cache (gigabytes;
made once). EDGE_FRAMEWORK_PYTHONS names interpreters that have them already, with `:` between."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from edge_server.process.disk import cache_directory
from edge_server.tools.convert.formats import TORCH, FrameworkPackages, lacks

ROOT = Path(__file__).parents[2]
# As `make_framework_venv` has it: PyPI's PyTorch for PCs brings gigabytes of CUDA.
_CPU_TORCH = "torch==2.13.0+cpu"
_CPU_INDEX = "--extra-index-url=https://download.pytorch.org/whl/cpu"


class PyTorch(NamedTuple):
    """A Python that has a wheel of PyTorch without CUDA, and pip's words for that wheel."""

    python: str
    words: tuple[str, ...]


@cache
def pytorch() -> PyTorch:
    """The newest Python of this machine with such a wheel; without one, the test is skipped."""
    if platform.machine() != "x86_64":
        return PyTorch(sys.executable, ("torch>=2.6,<3",))
    for words in ((_CPU_TORCH,), (_CPU_INDEX, _CPU_TORCH)):
        for version in ("3.12", "3.11", "3.13", "3.10"):
            if (python := find_python(version)) and _finds(python, words):
                return PyTorch(python, words)
    pytest.skip(f"pip finds no {_CPU_TORCH} for any Python of this machine")


def find_python(version: str) -> str:
    """An interpreter of that version, from PATH or pyenv; empty where there is none."""
    command = 'source scripts/environment.sh && find_python "$0"'
    found = subprocess.run(
        ["bash", "-c", command, version], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    return found.stdout.strip()


def _finds(python: str, words: tuple[str, ...]) -> bool:
    pip = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    tried = subprocess.run([*pip, "--no-deps", *words], capture_output=True, check=False)
    return tried.returncode == 0


def python_with(framework: FrameworkPackages) -> Path:
    given = [Path(p) for p in os.environ.get("EDGE_FRAMEWORK_PYTHONS", "").split(":") if p]
    found = next((python for python in given if not lacks(python, framework.modules)), None)
    return found or environment_of(framework)


def environment_of(framework: FrameworkPackages) -> Path:
    home = cache_directory() / "frameworks" / framework.name
    python, whole = home / "bin/python", home / "whole"
    if not whole.exists():
        made_with, lines = sys.executable, framework.requirements
        if framework is TORCH:
            made_with, words = pytorch()
            lines = (words, *lines[1:])
        subprocess.run([made_with, "-m", "venv", "--clear", home], check=True)
        for line in lines:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *line], check=True)
        whole.touch()
    return python
