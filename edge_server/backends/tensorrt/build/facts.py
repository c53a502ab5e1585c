"""Facts of the device that a plan depends on: the device that builds it and runs it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.board.jetpack import L4tRelease

if TYPE_CHECKING:
    from collections.abc import Callable

_RELEASE = Path("/etc/nv_tegra_release")


@dataclass(frozen=True)
class DeviceFacts:
    """Of one device; empty or 0 is what it does not have, or what could not be found out.

    Attributes:
        tensorrt: its version, in full: `10.3.0.30`.
        compute_capability: of the GPU: `8.7`.
        gpu: what the driver calls it.
        multiprocessors: how many the GPU has: Orin modules of one name differ in it.
        l4t: Jetson Linux's release: `36.4.7`.
        dla_cores: how many NVDLA cores TensorRT sees.
        reason: why there is no GPU, or no TensorRT; empty where both are there.
    """

    tensorrt: str = ""
    compute_capability: str = ""
    gpu: str = ""
    multiprocessors: int = 0
    l4t: str = ""
    dla_cores: int = 0
    reason: str = ""

    @property
    def sm(self) -> str:
        """`sm_87`, as compilers say it."""
        return f"sm_{self.compute_capability.replace('.', '')}" if self.compute_capability else ""

    @property
    def version(self) -> tuple[int, int]:
        """TensorRT's major and minor version; (0, 0) where there is none."""
        return version_of(self.tensorrt)


def full_version(reported: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """TensorRT's version with the build number, which TensorRT compares in plans too.

    Args:
        reported: what the bindings call it, which from 8.6 on may leave the build number out: `10.3.0`.
        load: opens a library by its name.
    """
    if reported.count(".") != 2:
        return reported
    try:
        # The library of the bindings: the loader never loads a second one of that name.
        library = load(f"libnvinfer.so.{reported.split('.', maxsplit=1)[0]}")
        return f"{reported}.{library.getInferLibBuildVersion()}"
    except (OSError, AttributeError):
        # TensorRT 8 has no such function.
        return reported


def version_of(text: str) -> tuple[int, int]:
    """`10.3.0.30` is (10, 3)."""
    numbers = [int(part) for part in text.split(".")[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def l4t_release(path: Path = _RELEASE) -> str:
    """`36.4.7` from `# R36 (release), REVISION: 4.7, …`; empty where this is no Jetson."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return str(L4tRelease.parse(text) or "")
