"""Map CUDA's errors to ours.

pycuda reports no code, only a text that ends in the driver's text for the code
(`cuStreamSynchronize failed: unspecified launch failure`); so the class looks up the driver's
texts.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import DeviceLost, EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
    from edge_server.gpu.libcuda import Libcuda

OUT_OF_MEMORY = 2
_ANEW = "compile them with its own toolkit (scripts/build_kernels)"
# CUresults of a kernel image that the driver refuses, and the remedy for each.
KERNEL_REMEDIES = MappingProxyType(
    {
        200: f"the file of the kernels is damaged, or of a kind that this driver does not know; "
        f"install edge-server anew, or {_ANEW}",
        209: f"they were not compiled for this GPU and driver; {_ANEW}",
        218: f"this driver cannot compile their PTX; {_ANEW}",
        221: "the driver's compiler, libnvidia-ptxjitcompiler.so.1, is missing; install the driver "
        "anew (on a Jetson: apt install --reinstall nvidia-l4t-cuda, in a container: "
        "--runtime nvidia)",
        222: f"they were not compiled for this GPU and driver; {_ANEW}",
        223: f"compiling PTX is switched off; take CUDA_DISABLE_PTX_JIT out of the environment, or "
        f"{_ANEW}",
    }
)
# Sticky CUresults, after which every call in the context fails the same way: memory errors of the
# hardware, a kernel that crashed or timed out, a destroyed context, and "unknown".
STICKY = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999)


class Failures:
    """Classifies the errors of one driver by the driver's own texts."""

    def __init__(self, libcuda: Libcuda) -> None:
        self._sticky = {text: code for code in STICKY if (text := libcuda.error_text(code))}
        self._out_of_memory = libcuda.error_text(OUT_OF_MEMORY)
        self._kernels = {
            text: remedy
            for code, remedy in KERNEL_REMEDIES.items()
            if (text := libcuda.error_text(code))
        }

    def classify(self, driver_text: str, gpu: str, doing: str) -> EdgeServerError:
        """Return our error for pycuda's `driver_text`.

        Args:
            driver_text: the text of pycuda's error, or of the driver's.
            gpu: the GPU's name in messages: `GPU 0`.
            doing: the attempted action, as part of a sentence: `copy to the device`.

        Returns:
            DeviceLost when only a new process can recover, Unavailable where memory is short or the
            driver refuses the kernels, InternalError otherwise.
        """
        for text, code in self._sticky.items():
            if text in driver_text:
                return DeviceLost(
                    f"{gpu}: {doing}: {driver_text} (CUDA error {code}): "
                    "the process must start anew"
                )
        if self._out_of_memory in driver_text:
            return Unavailable(
                f"{gpu}: {doing}: {driver_text}: fewer models, instances or smaller batches fit, "
                "or another process must give memory back"
            )
        for text, remedy in self._kernels.items():
            if text in driver_text:
                return Unavailable(f"{gpu}: {doing}: {driver_text}: {remedy}")
        return InternalError(f"{gpu}: {doing}: {driver_text}")
