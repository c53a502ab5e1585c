"""`scripts/gpu_check` says where it cannot run, and does not take a GPU's word for its numbers.

The GPU is simulated, and its kernels do nothing at all here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

ROOT = Path(__file__).parents[2]
GPU_CHECK = ROOT / "scripts/gpu_check"
TIMEOUT_S = 600.0
# A sketch that is not cut short on any machine.
SKETCH = ("--quick", "--most-s", "500")


def gpu_check(
    environment: dict[str, str],
    *arguments: str,
    python: Path | str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [GPU_CHECK, *arguments],
        env={**environment, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_without_a_gpu_it_says_so() -> None:
    # Nobody finds a driver there.
    done = gpu_check({**os.environ, "CUDA_VISIBLE_DEVICES": "none"})
    assert done.returncode == 69
    assert done.stderr.startswith("gpu_check: no CUDA d")


def test_a_module_that_is_missing_is_told_by_its_package(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = "import cv2" ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = gpu_check(simulated_libcuda.environment("compute=87"), python=python)
    assert done.returncode == 1
    assert "has no cv2; on a Jetson: apt install python3-opencv, and no numpy 2" in done.stderr


def test_a_module_that_cannot_be_imported_is_told_with_why(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    # As apt's OpenCV beside numpy 2.
    (tmp_path / "cv2.py").write_text("raise ImportError('numpy.core.multiarray failed to import')")
    environment = simulated_libcuda.environment("compute=87")
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = gpu_check(environment)
    assert done.returncode == 1
    why = "cannot import cv2: ImportError: numpy.core.multiarray failed to import; on a Jetson: "
    assert why in done.stderr


# A python3 that is no venv's own, and whose venvs are only this script again; it tells what was
# asked of pip, and whether the system has an OpenCV is in the environment.
SYSTEM_PYTHON = """#!/bin/bash
case "$*" in
*"-m venv"*) mkdir -p "${@: -1}/bin" && ln -s "$0" "${@: -1}/bin/python" ;;
*"-m pip"*) echo "pip: ${*: -1} constraints: $(cat "${PIP_CONSTRAINT:-/dev/null}")" >&2 ;;
*sys.base_prefix*) exit 1 ;;
*find_spec*) exit "$SYSTEM_CV2" ;;
*) exec PYTHON "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("system_cv2", "asked"),
    [
        (0, "[gpu-check] constraints: numpy<2"),
        pytest.param(1, "[gpu-check,onnxruntime] constraints: ", marks=pytest.mark.long),
    ],
)
def test_beside_the_systems_opencv_numpy_stays_what_that_was_built_for(
    simulated_libcuda: SimulatedGpu, tmp_path: Path, system_cv2: int, asked: str
) -> None:
    python = tmp_path / "python3"
    python.write_text(SYSTEM_PYTHON.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    environment = {
        **simulated_libcuda.environment("compute=87"),
        "GPU_CHECK_VENV": str(tmp_path / "venv"),
        "SYSTEM_CV2": str(system_cv2),
    }
    # Nothing is run: only what comes before that is of interest.
    done = gpu_check(environment, "--only", "nothing", python=python)
    assert f"pip: {ROOT}{asked}\n" in done.stderr
    # What is there already is not asked for where there is no time.
    done = gpu_check(environment, "--quick", "--only", "nothing", python=python)
    assert "pip: " not in done.stderr
    assert "invalid choice: 'nothing'" in done.stderr


@pytest.mark.long
def test_what_has_no_more_time_is_told_with_what_it_has(tmp_path: Path) -> None:
    program = tmp_path / "section.py"
    program.write_text(
        "import pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[2])\n"
        "path.write_text('{\"rows\": ' + ('[1]' if ROWS else '[]') + ', \"goals\": []}')\n"
        "print('half of it', flush=True)\n"
        "time.sleep(600)\n"
    )
    report = load_report()

    def section_with(rows: str) -> dict[str, Any]:
        folder = tmp_path / rows
        folder.mkdir()
        (folder / "one.py").write_text(program.read_text().replace("ROWS", rows))
        section: dict[str, Any] = report.run(str(folder / "one.py"), str(folder), 5.0, quick=True)
        return section

    with ThreadPoolExecutor() as both:
        sections = list(both.map(section_with, ("True", "False")))
    assert [section["outcome"] for section in sections] == ["cut short", "failed"]
    for section in sections:
        assert section["text"].startswith("half of it")
        assert "ended after 5 s" in section["text"]


def test_a_section_without_figures_has_failed(tmp_path: Path) -> None:
    program = tmp_path / "section.py"
    program.write_text(
        "import pathlib, sys\n"
        'pathlib.Path(sys.argv[2]).write_text(\'{"rows": [], "goals": [], "notes": []}\')\n'
    )
    section = load_report().run(str(program), str(tmp_path), 60.0, quick=False)
    assert section["outcome"] == "failed"
    assert "no figures came of it" in section["text"]


def load_report() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_report", ROOT / "benchmarks/gpu_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_that_do_nothing_are_found_out_by_the_python_that_there_is_and_without_git(
    simulated_libcuda: SimulatedGpu, tmp_path: Path
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "GPU_CHECK_VENV": str(tmp_path / "venv"),
        "PATH": str(tools),
    }
    sections = ["--only", "kernels", "--only", "frame to lanes"]
    done = gpu_check(environment, *SKETCH, "--output", str(tmp_path), *sections)
    assert done.returncode == 0, done.stderr
    assert "is of a virtual environment, which is used as it is" in done.stderr
    assert not (tmp_path / "venv").exists()
    (path,) = tmp_path.glob("simulated-gpu-0-*-quick.json")
    report = json.loads(path.read_text())
    assert report["machine"]["commit"] == "unknown"
    assert report["machine"]["sm"] == "90"
    assert report["machine"]["binding"] == "pycuda stand-in, tests/simulated_gpu over ctypes"
    goals = {goal["goal"]: goal["met"] for goal in report["goals"]}
    assert goals == {
        "as on the CPU, within 1/255": False,
        "a copy on the device: no copy between preprocessing and network": True,
        "a copy on the device: lanes within 1 px of those by the host": False,
    }
    (row,) = report["sections"]["frame to lanes"]["rows"]
    assert row["copies_per_frame"] == {
        "lane_preprocess to_device": 1.0,
        "laneDetect_model to_host": 1.0,
    }
    assert "NOT MET       as on the CPU" in path.with_suffix(".txt").read_text()


def tensorrt_section(
    environment: dict[str, str], tmp_path: Path, *, code: int = 0
) -> dict[str, Any]:
    done = gpu_check(environment, *SKETCH, "--output", str(tmp_path), "--only", "tensorrt")
    assert done.returncode == code, done.stderr
    (path,) = tmp_path.glob("*.json")
    section: dict[str, Any] = json.loads(path.read_text())["sections"]["tensorrt"]
    return section


@pytest.mark.parametrize(
    ("settings", "is_right"), [pytest.param("", True, marks=pytest.mark.long), ("off=100", False)]
)
def test_a_plan_is_compared_with_onnx_runtime(
    simulated_libcuda: SimulatedGpu,
    kernels_on_cpu: Path,
    tmp_path: Path,
    settings: str,
    is_right: bool,
) -> None:
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "EDGE_SIMULATED_KERNELS": str(kernels_on_cpu),
        "EDGE_SIMULATED_TENSORRT": settings,
    }
    section = tensorrt_section(environment, tmp_path)
    assert section["notes"][0].startswith("the tests' simulation of TensorRT")
    errors = [row["largest_error"] for row in section["rows"] if "largest_error" in row]
    assert errors == pytest.approx([0.0 if is_right else 100.0] * 2, abs=1e-2)
    numbers = {goal["met"] for goal in section["goals"] if " within " in goal["goal"]}
    others = {goal["met"] for goal in section["goals"] if " within " not in goal["goal"]}
    assert numbers == {is_right}
    # Copies and graphs are as they were.
    assert others == {True}


@pytest.mark.long
def test_a_tensorrt_that_refuses_is_quoted(simulated_libcuda: SimulatedGpu, tmp_path: Path) -> None:
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "EDGE_SIMULATED_TENSORRT": "fail=build",
    }
    section = tensorrt_section(environment, tmp_path, code=1)
    refused = "TensorRT 10.3.0.30 built nothing: Error Code 10: Internal Error"
    assert section["outcome"] == "failed"
    assert any(f"the shipped network, FP16: {refused}" in note for note in section["notes"])
    assert {goal["met"] for goal in section["goals"]} == {False}


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (
            ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"),
            "neither TensorRT nor TensorRT-RTX can be imported",
        ),
        # NVIDIA's edition for desktops, which knows no Hopper.
        pytest.param(
            (), r"TensorRT-RTX [\d.]+ has no SM90: it has SM75, SM80, ", marks=pytest.mark.long
        ),
    ],
)
def test_a_gpu_without_any_tensorrt_for_it_is_told(
    simulated_libcuda: SimulatedGpu, tmp_path: Path, hidden: tuple[str, ...], said: str
) -> None:
    if not hidden:
        pytest.importorskip("tensorrt_rtx_bindings")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {hidden}:\n    sys.modules[name] = None\n"
    )
    # The script itself stands in for pycuda, and for nothing that is not there.
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "PYTHONPATH": str(tmp_path),
    }
    section = tensorrt_section(environment, tmp_path, code=1)
    assert section["outcome"] == "not possible here"
    assert re.search(said, section["text"])


SANITIZER = """#!/bin/sh
# Runs nothing; says what compute-sanitizer says at its end.
echo "========= $2: $FOUND"
"""


@pytest.mark.parametrize(
    ("found", "met"),
    [
        pytest.param("ERROR SUMMARY: 0 errors", True, marks=pytest.mark.long),
        ("ERROR SUMMARY: 3 errors", False),
        pytest.param("", False, marks=pytest.mark.long),
    ],
)
def test_what_the_sanitizer_finds_is_a_goal_that_is_missed(
    simulated_libcuda: SimulatedGpu, tmp_path: Path, found: str, met: bool
) -> None:
    (tmp_path / "compute-sanitizer").write_text(SANITIZER)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    environment = simulated_libcuda.environment("compute=90,integrated=0")
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "FOUND": found}
    done = gpu_check(environment, *SKETCH, "--output", str(tmp_path), "--only", "sanitizer")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert report["machine"]["level"] == "S: a simulation of ours"
    assert [goal["met"] for goal in report["goals"]] == [met]


@pytest.mark.long
def test_what_four_cameras_add_to_device_memory_is_a_goal(
    simulated_libcuda: SimulatedGpu, kernels_on_cpu: Path, tmp_path: Path
) -> None:
    environment = {
        **simulated_libcuda.environment("compute=90,integrated=0"),
        "EDGE_SIMULATED_KERNELS": str(kernels_on_cpu),
    }
    done = gpu_check(environment, *SKETCH, "--output", str(tmp_path), "--only", "endurance")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    section = json.loads(path.read_text())["sections"]["endurance"]
    *gaps, cameras = section["rows"]
    assert [row["freed"] for row in gaps] == ["device memory and graphs", "the shipped models"]
    assert cameras["frames"] > 0
    # How many buffers four cameras need at once is the machine's own here, and so are the gaps.
    assert section["goals"][-1]["met"] == (cameras["growth_bytes"] <= 2 << 20)


def test_the_page_of_claims_names_sections_that_there_are() -> None:
    text = (ROOT / "docs/board.md").read_text()
    named = re.findall(r"--only (?:'([^']+)'|(\w+))", text)
    report = load_report()
    assert {quoted or word for quoted, word in named} == {report.TESTS, *report.SECTIONS}
