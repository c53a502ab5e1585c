"""What `pip install` puts there is enough for the demo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from support.free_ports import free_ports
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The content of a wheel, in a directory of its own."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "installed")
    return wheel.parent / "installed"


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


@pytest.mark.long
def test_a_clean_environment_serves_lanes(
    wheel: Path, tmp_path: Path, road_input: triton.InferInput
) -> None:
    """With what pip finds for the wheel's own dependencies; PyPI, or a mirror, is needed."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv/bin"
    # Neither this environment's packages nor the checkout.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        if "Failed to establish a new connection" in done.stderr:
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(programs / "pip", "install", "--quiet", f"{wheel}[onnxruntime]")
    run(programs / "pip", "check")
    assert len(run(programs / "edge-server", "demo", "--frames=2", "--json").splitlines()) == 2
    (models,) = tmp_path.glob("venv/lib/python*/site-packages/edge_server/models")
    (port,) = free_ports(1)
    serve = [programs / "edge-server", "run", f"--grpc-port={port}", "--metrics-port=0"]
    serve += ["--http-port=0", f"--model-repository={models}", f"--grpc-socket={tmp_path}/socket"]
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(serve, cwd=tmp_path, env=clean, stderr=log)
    try:
        wait_until(lambda: "ready, " in (tmp_path / "log").read_text(), 60)
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            lanes = client.infer("lane_detection", [road_input]).as_numpy("lane_points")
        assert lanes is not None
        assert lanes.shape[1] >= 2
    finally:
        daemon.terminate()
        assert daemon.wait(30) == 0
