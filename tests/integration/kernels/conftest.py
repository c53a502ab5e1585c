"""The kernels, compiled for this CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from integration.kernels.shim import BuildShim, Shim

ROOT = Path(__file__).parents[3]
BUILD_SHIM = ROOT / "tests/simulated_gpu/kernel_shim/build_shim"
KERNELS = ROOT / "edge_server/gpu/kernels"


@pytest.fixture(scope="session")
def kernels() -> Path:
    """Where the sources and the images lie."""
    return KERNELS


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ here: the kernels are compiled for the CPU with it")
    return found


@pytest.fixture(scope="session")
def build_shim(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> BuildShim:
    """Compiles a version of preprocess.cu for this CPU."""
    directory = tmp_path_factory.mktemp("shims")

    def build(source: Path) -> Shim:
        library = directory / f"{len(list(directory.iterdir()))}.so"
        subprocess.run(
            [BUILD_SHIM, library, source], check=True, env={**os.environ, "CXX": compiler}
        )
        return Shim(library)

    return build


@pytest.fixture(scope="session")
def shim(kernels_on_cpu: Path) -> Shim:
    return Shim(kernels_on_cpu)
