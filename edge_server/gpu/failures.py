"""Our errors for the errors of CUDA.

pycuda gives no code, only a text that ends in the driver's own words for it
(`cuStreamSynchronize failed: unspecified launch failure`); so the driver is asked for its words.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import DeviceLost, EdgeServerError, InternalError, Unavailable

if TYPE_CHECKING:
    from edge_server.gpu.libcuda import Libcuda

OUT_OF_MEMORY = 2
_ANEW = "compile them with its own toolkit (scripts/build_kernels)"
# Of CUresult, what the driver has against kernels, and what to do about it.
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
# Of CUresult, those after which the context answers every call the same way: memory errors of the
# hardware, a kernel that went wrong or took too long, a context that is gone, and "unknown".
STICKY = (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999)


class Failures:
    """Classifies the errors of one driver by its own texts for them."""

    def __init__(self, libcuda: Libcuda) -> None:
        self._sticky = {text: code for code in STICKY if (text := libcuda.error_text(code))}
        self._out_of_memory = libcuda.error_text(OUT_OF_MEMORY)
        self._kernels = {
            text: remedy
            for code, remedy in KERNEL_REMEDIES.items()
            if (text := libcuda.error_text(code))
        }

    def classify(self, driver_text: str, gpu: str, doing: str) -> EdgeServerError:
        """Our error for what pycuda `driver_text`.

        Args:
            driver_text: the text of pycuda's error, or of a driver's.
            gpu: as a person knows it: `GPU 0`.
            doing: what was tried, as part of a sentence: `copy to the device`.

        Returns:
            DeviceLost for what only a new process can mend, Unavailable where memory is short or
            the driver does not take the kernels, InternalError for all else.
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
