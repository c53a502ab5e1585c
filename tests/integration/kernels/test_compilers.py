"""The kernels go through the real compilers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

KERNELS = 10


@pytest.mark.parametrize("architecture", ["sm_87", "sm_90"])
def test_kernels_compile_without_spilling(architecture: str, kernels: Path, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here: nothing compiles CUDA")
    ran = subprocess.run(
        [nvcc, "--cubin", f"--gpu-architecture={architecture}", "--ptxas-options=-v",
         "--Werror=all-warnings", "-o", tmp_path / "cubin", kernels / "preprocess.cu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = ran.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    assert told == KERNELS, ran.stderr


def test_a_change_of_a_source_is_noticed_without_a_compiler(kernels: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(kernels, root / "edge_server/gpu/kernels")
    script = kernels.parents[2] / "scripts/build_kernels"
    (root / "scripts").mkdir()
    shutil.copy(script, root / "scripts")
    # A path without nvcc, an interpreter without NVRTC.
    environment = {k: v for k, v in os.environ.items() if k not in ("NVCC", "NVRTC")}
    environment["PATH"] = str(tmp_path)

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", root / "scripts/build_kernels", "--check"],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip

    current = check()
    assert current.returncode == 0, current.stderr
    assert "not compiled again: no nvcc here" in current.stdout
    source = root / "edge_server/gpu/kernels/preprocess.cu"
    source.write_text(source.read_text() + "\n")
    stale = check()
    assert stale.returncode == 1
    assert "preprocess.cu: not as manifest.json has it; run scripts/build_kernels" in stale.stderr
