"""One report of what this machine's GPU does: `scripts/gpu_check` runs it.

    python benchmarks/gpu_report.py [--output DIRECTORY] [--only SECTION]... [--quick]

Each section is a program of its own, so that one which loses the device costs no other. A new one
is a line in `SECTIONS`: it takes `--json FILE` (and `--quick`), writes there an object with `rows`,
`goals` (goal, reached, met) and `notes`, prints for people, and exits 69 with the reason on its
standard error where it is not possible here. One that ends without rows has failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from edge_server.errors import Unavailable
from edge_server.gpu.device import Device, Devices, version_text

ROOT = Path(__file__).parent.parent
SECTIONS = {
    "kernels": "benchmarks/preprocess.py",
    "frame to lanes": "benchmarks/gpu_chain.py",
    "tensorrt": "benchmarks/gpu_tensorrt.py",
    "sanitizer": "benchmarks/gpu_sanitizer.py",
    "endurance": "benchmarks/gpu_endurance.py",
}
TESTS = "hardware tests"
NOT_POSSIBLE = 69
PATIENCE_S = 1800.0
# A sketch is over in two minutes, whatever the machine: what is left is shared among those to come.
QUICK_S = 105.0
DISTRIBUTIONS = (
    *("numpy", "pycuda", "torch", "onnxruntime", "onnxruntime-gpu", "tensorrt"),
    *("tensorrt-rtx-cu12-bindings", "opencv-python-headless", "cupy-cuda13x", "cupy-cuda12x"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="a sketch, whose figures say nothing")
    parser.add_argument(
        "--only", action="append", choices=[TESTS, *SECTIONS], help="this section; repeatable"
    )
    parser.add_argument(
        "--most-s",
        type=float,
        help=f"what is not done by then is cut short; {QUICK_S:g} where it is --quick",
    )
    arguments = parser.parse_args()
    most_s = arguments.most_s or (QUICK_S if arguments.quick else None)
    try:
        machine = this_machine()
    except Unavailable as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return NOT_POSSIBLE
    text = [f"{key:14} {value}" for key, value in machine.items()]
    print("\n".join(text), flush=True)
    sections: dict[str, dict[str, Any]] = {}
    wanted = arguments.only or [TESTS, *SECTIONS]
    end_s = time.monotonic() + (most_s or 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for done, name in enumerate(wanted):
            print(f"\n== {name}", flush=True)
            patience_s = PATIENCE_S
            if most_s is not None:
                patience_s = max(1.0, end_s - time.monotonic()) / (len(wanted) - done)
            sections[name] = section = (
                run_tests(Path(folder), patience_s, quick=arguments.quick)
                if name == TESTS
                else run(SECTIONS[name], folder, patience_s, quick=arguments.quick)
            )
            print(section["text"], flush=True)
            text += ["", f"== {name}: {section['outcome']}", section["text"]]
    goals = [goal for section in sections.values() for goal in section.get("goals", ())]
    text += ["", "== goals", *map(goal_text, goals)]
    print("\n".join(["", "== goals", *map(goal_text, goals)]))

    arguments.output.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    stem = f"{slug}-{machine['date'][:10]}" + ("-quick" if arguments.quick else "")
    report = {"machine": machine, "quick": arguments.quick, "sections": sections, "goals": goals}
    for suffix, content in ((".json", json.dumps(report, indent=1)), (".txt", "\n".join(text))):
        path = arguments.output / f"{stem}{suffix}"
        path.write_text(content + "\n")
        print(path)
    failed = any(section["outcome"] == "failed" for section in sections.values())
    measured = any(section.get("rows") for section in sections.values())
    return int(failed or not measured)


def this_machine() -> dict[str, Any]:
    """What the figures belong to.

    Raises:
        Unavailable: there is no GPU that can be used.
    """
    devices = Devices()
    try:
        device = devices.gpu()
        major, minor = device.compute_capability
        found = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": device.name,
            "sm": f"{major}{minor}",
            "memory_bytes": device.total_memory_bytes,
            "integrated": device.integrated,
            "driver": driver_version(),
            "cuda_of_driver": version_text(device.driver_version),
            "binding": f"pycuda {pycuda_origin()}",
            "level": level(device),
        }
    finally:
        devices.close()
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        **found,
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
        "commit": commit(),
    }


def run_tests(folder: Path, patience_s: float, *, quick: bool) -> dict[str, Any]:
    """`tests/hardware`, whose conftest is the only one: the others want more than is needed."""
    results = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "hardware", "tests/hardware", "-q", "-rs"]
    command += ["--confcutdir=tests/hardware", f"--junitxml={results}", "-W", "default"]
    if quick:
        # The section of TensorRT tries as much, and one size of frame stands for the others.
        command += ["--ignore=tests/hardware/test_tensorrt.py", "-k", "not test_resized or 720p"]
    code, output, errors = ended([*command, "-p", "no:cacheprovider"], patience_s)
    if not results.exists():
        return {"outcome": "failed", "text": tail(output + errors)}
    root = ElementTree.parse(results).getroot()  # noqa: S314 - pytest wrote it
    suite = root[0].attrib
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    passed = code == 0 and counts["tests"] > counts["skipped"]
    return {
        "outcome": "ran" if passed else "failed",
        "rows": [counts],
        "goals": [
            {
                "goal": "hardware tests pass",
                "reached": "{tests} tests, {failures} failed, {errors} errors, {skipped} "
                "skipped".format(**counts),
                "met": passed,
            }
        ],
        "text": tail(output),
    }


def run(program: str, folder: str, patience_s: float, *, quick: bool) -> dict[str, Any]:
    """A section's findings, or why there are none."""
    results = Path(folder) / "section.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, program, "--json", str(results), *["--quick"] * quick]
    code, output, errors = ended(command, patience_s)
    if code == NOT_POSSIBLE:
        return {"outcome": "not possible here", "text": tail(errors, 1)}
    found = json.loads(results.read_text()) if results.exists() else {}
    outcome = "ran" if code == 0 else "cut short" if code is None else "failed"
    if found.get("rows") and outcome != "failed":
        return {"outcome": outcome, **found, "text": output.rstrip()}
    text = tail(output + errors if code else output)
    return {"outcome": "failed", **found, "text": f"{text}\nno figures came of it".strip()}


def ended(command: list[str], patience_s: float) -> tuple[int | None, str, str]:
    """How it ended, its standard output and its standard error; None where its time was over."""
    # Files, as who is ended leaves its pipes open to those whom it started.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            code: int | None = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=errors, timeout=patience_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
            output.write(f"\nended after {patience_s:.0f} s\n")
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read()


def goal_text(goal: dict[str, Any]) -> str:
    reached = goal["reached"]
    if reached is None:
        return f"not measured  {goal['goal']}"
    shown = f"{reached:.3g}" if isinstance(reached, float) else reached
    return f"{'met' if goal['met'] else 'NOT MET':13} {goal['goal']}: {shown}"


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def pycuda_origin() -> str:
    """Its version, or that it is the tests' own."""
    import pycuda  # noqa: PLC0415 - the driver has been opened with it

    if "SIMULATION" in (pycuda.__doc__ or ""):
        return "stand-in, tests/simulated_gpu over ctypes"
    return str(pycuda.VERSION_TEXT)


def level(device: Device) -> str:
    """How far this report shows a claim: docs/board.md."""
    if "Simulated" in device.name:
        return "S: a simulation of ours"
    return "O: a Jetson" if device.integrated else "G: an NVIDIA GPU in a PC"


def driver_version() -> str:
    """Of the kernel module, or of the board's L4T."""
    for path, pattern in (
        ("/sys/module/nvidia/version", r"(.+)"),
        ("/etc/nv_tegra_release", r"(# R.*?)(?:, GCID|$)"),
    ):
        try:
            found = re.match(pattern, Path(path).read_text())
        except OSError:
            continue
        if found:
            return found[1].strip()
    return "unknown"


def cpu_name() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
