"""The facts of a device on which a plan depends."""

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
    """Facts of one device; empty or 0 for a missing part, or an unknown fact.

    Attributes:
        tensorrt: its full version: `10.3.0.30`.
        compute_capability: of the GPU: `8.7`.
        gpu: the driver's name of the GPU.
        multiprocessors: of the GPU: Orin modules of one name differ in their number.
        l4t: Jetson Linux's release: `36.4.7`.
        dla_cores: number of NVDLA cores that TensorRT reports.
        reason: why the GPU or TensorRT is missing; empty if both are present.
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
        """`sm_87`, the compilers' spelling."""
        return f"sm_{self.compute_capability.replace('.', '')}" if self.compute_capability else ""

    @property
    def version(self) -> tuple[int, int]:
        """TensorRT's major and minor version; (0, 0) without TensorRT."""
        return version_of(self.tensorrt)


def full_version(reported: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Return TensorRT's version with the build number, which TensorRT compares in plans too.

    Args:
        reported: the bindings' version, which from 8.6 on may leave the build number out: `10.3.0`.
        load: opens a library by its name.
    """
    if reported.count(".") != 2:
        return reported
    try:
        # The bindings' own library: the loader never loads a second one of that name.
        library = load(f"libnvinfer.so.{reported.split('.', maxsplit=1)[0]}")
        return f"{reported}.{library.getInferLibBuildVersion()}"
    except (OSError, AttributeError):
        # TensorRT 8 lacks this function.
        return reported


def version_of(text: str) -> tuple[int, int]:
    """Return `10.3.0.30` as (10, 3)."""
    numbers = [int(part) for part in text.split(".")[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def l4t_release(path: Path = _RELEASE) -> str:
    """Return `36.4.7` from `# R36 (release), REVISION: 4.7, …`; empty where the machine is no
    Jetson."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return str(L4tRelease.parse(text) or "")
