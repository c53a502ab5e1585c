"""compute-sanitizer over the kernels: wrong accesses, races, unwritten memory, barriers.

    python benchmarks/gpu_sanitizer.py [--quick] [--json FILE]

Runs the tests of the kernels (tests/hardware/test_preprocess.py, two small sizes) under each of its
tools. Exits 69 where there is no GPU, or no compute-sanitizer: it comes with the CUDA
toolkit, on a Jetson by `apt install cuda-sanitizer-12-6`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_section import run_section

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.gpu.device import Devices

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
TESTS = [
    *("-m", "pytest", "-m", "hardware", "tests/hardware/test_preprocess.py", "-q"),
    *("-k", "few or odd", "--confcutdir=tests/hardware", "-W", "default"),
    *("-p", "no:cacheprovider"),
]


def main() -> int:
    return run_section("gpu_sanitizer", __doc__, report)


def report(devices: Devices, quick: bool) -> Iterator[dict[str, Any]]:
    devices.gpu()
    sanitizer = find_sanitizer()
    rows, goals = [], []
    for tool in TOOLS[:1] if quick else TOOLS:
        command = [sanitizer, "--tool", tool, "--target-processes", "all", sys.executable, *TESTS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        counts = [int(count) for count in SUMMARY.findall(done.stdout + done.stderr)]
        found = sum(counts) if counts else None
        rows.append({"tool": tool, "errors": found, "exit_code": done.returncode})
        goals.append(
            {
                "goal": f"{tool} finds nothing wrong in the kernels",
                "reached": found,
                "met": found == 0 and done.returncode == 0,
            }
        )
        lines = (done.stdout + done.stderr).splitlines()
        print(
            f"{tool}: {found} errors", *(lines[-20:] if found or done.returncode else []), sep="\n"
        )
        yield {"rows": rows, "goals": goals, "notes": [sanitizer]}


def find_sanitizer() -> str:
    """The program's path.

    Raises:
        Unavailable: it is not here.
    """
    for name in ("compute-sanitizer", *PLACES):
        if found := shutil.which(name):
            return found
    raise Unavailable(
        "compute-sanitizer is not here: it comes with the CUDA toolkit "
        "(on a Jetson: apt install cuda-sanitizer-12-6)"
    )


if __name__ == "__main__":
    sys.exit(main())
