"""What the scripts write: only what they were asked to, and only over what is their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("script", "written"),
    [
        ("asyncapi.py", "docs/asyncapi.json"),
        ("build_kernels", "edge_server/gpu/kernels/manifest.json"),
        ("generate_proto", "edge_server/proto/edge/lanes/v1/lanes_pb2.py"),
        ("reference_pages.py", "docs/reference/settings.md"),
        ("triton_table.py", "docs/triton.md"),
    ],
)
def test_a_script_takes_no_option_but_its_own_in_full(script: str, written: str) -> None:
    before = (ROOT / written).stat().st_mtime_ns
    interpreter = [sys.executable] if script != "generate_proto" else []
    ran = run(*interpreter, SCRIPTS / script, "--chec")
    assert ran.returncode == 2, ran
    assert "usage" in ran.stderr
    assert (ROOT / written).stat().st_mtime_ns == before


@pytest.mark.parametrize("others", [["notes.txt"], ["pool", "dists"], ["pool", "notes.txt"]])
def test_a_repository_replaces_nothing_but_a_repository(tmp_path: Path, others: list[str]) -> None:
    for name in others:
        (tmp_path / "out" / name).mkdir(parents=True)
    ran = run(SCRIPTS / "build_repo", "--key", "k", "--out", tmp_path / "out", "any.deb")
    assert ran.returncode == 2, ran
    assert f"{tmp_path / 'out'} is not a repository" in ran.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(others)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "arguments", [[], ["0.1"], ["--key"], ["9.9.9"], ["--dry-run"], ["--dry-run", "1.2.3", "4.5.6"]]
)
def test_a_release_wants_a_version_and_a_key(arguments: list[str]) -> None:
    ran = run(SCRIPTS / "release", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "scripts/release --key KEY VERSION" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--dry-run"], 0), (["--key", "nobody@example.invalid"], 1)]
)
def test_a_release_names_every_obstacle_and_makes_nothing(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNUPGHOME", str(tmp_path))
    ran = run(SCRIPTS / "release", *arguments, "9.9.9")
    assert ran.returncode == code, ran
    for obstacle in (
        "release: pyproject.toml: its version is not 9.9.9",
        "release: clients/python/pyproject.toml: its version is not 9.9.9",
        "release: clients/cpp/CMakeLists.txt: its version is not 9.9.9",
        "release: CHANGELOG.md: has no section '## 9.9.9'",
    ):
        assert obstacle in ran.stderr
    compiled = list(ROOT.glob("dist/wheels/noble-arm64/pycuda-*.whl"))
    remedy = "has no pycuda; run scripts/build_pycuda_wheel noble-arm64\n"
    assert (remedy in ran.stderr) == (not compiled)
    steps = ran.stdout.splitlines()
    # A real run ends before the first step.
    assert [step.split()[0] for step in steps][-2:] == ([] if code else ["gpg", "git"])
    assert not (ROOT / "dist/release/9.9.9").exists()
