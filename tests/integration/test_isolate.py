"""Tests see a machine that nobody has prepared, and what they leave on it is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def isolated(script: str, *before: str) -> subprocess.CompletedProcess[str]:
    command = [*before, str(ROOT / "scripts/isolate"), "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_what_a_command_leaves_behind_is_named() -> None:
    ran = isolated('echo >"$HOME/left.txt"')
    assert ran.returncode == 1
    assert "left behind: " in ran.stderr
    assert "/left.txt" in ran.stderr


def test_the_status_of_a_command_that_leaves_nothing_is_its_own() -> None:
    assert isolated("exit 7").returncode == 7


def test_a_checkout_in_a_hidden_folder_may_have_caches() -> None:
    checkout = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        subprocess.run(["git", "init", "-q", checkout], check=True)
        shutil.copytree(ROOT / "scripts", checkout / "scripts")
        script = (
            "mkdir .pytest_cache && echo >.pytest_cache/x && echo '*' >.pytest_cache/.gitignore"
        )
        ran = subprocess.run(
            [checkout / "scripts/isolate", "bash", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            cwd=checkout,
        )
    finally:
        shutil.rmtree(checkout)
    assert ran.returncode == 0, ran.stderr


def test_the_folders_of_the_machine_are_empty_or_read_only() -> None:
    ran = isolated(
        "find /var/lib /tmp /var/tmp -mindepth 1 -maxdepth 1 -name 'pytest*'\n"
        "for place in /etc /usr; do touch $place/edge-server-was-here && echo $place; done\n"
        "true"
    )
    if "no mounts are allowed here" in ran.stderr:
        pytest.skip("no mounts are allowed here")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr.count("Read-only") == 2


def test_where_no_mounts_are_allowed_home_is_empty_and_it_says_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody who may mount nothing")
    other = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env")
    # The tests' own folders are closed to others.
    folder = tempfile.mkdtemp(dir="/tmp")
    try:
        Path(folder).chmod(0o777)
        ran = isolated('ls -A "$HOME"; echo >"$HOME/left"', *other, f"TMPDIR={folder}")
    finally:
        shutil.rmtree(folder)
    assert ran.stdout == ""
    assert "no mounts are allowed here" in ran.stderr
    assert "/home/left" in ran.stderr
    assert ran.returncode == 1
