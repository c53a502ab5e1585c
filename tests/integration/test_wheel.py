"""What `pip install` puts there is enough for the demo."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel, in a directory of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # A build leaves its own files beside what it is made of.
    for name in ("edge_server", "models", "pyproject.toml", "README.md"):
        command = ["cp", "-a", str(ROOT / name), str(source)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
    for egg_info in source.rglob("*.egg-info"):
        shutil.rmtree(egg_info)
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("no setuptools in this environment")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    shutil.rmtree(source)
    return folder / "installed"


def test_the_shipped_models_come_with_the_wheel(installed: Path) -> None:
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "models").rglob("*")}
    came = {
        str(path.relative_to(installed / "edge_server"))
        for path in (installed / "edge_server" / "models").rglob("*")
    }
    assert came == there


def test_the_demo_runs_from_the_wheel_wherever_it_is_started(
    installed: Path, tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import edge_server\n"
        f"assert edge_server.__file__.startswith({str(installed)!r})\n"
        "from edge_server.cli.main import run_command\n"
        "sys.exit(run_command(['demo', '--frames', '2', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert (tmp_path / "lanes.png").exists()
