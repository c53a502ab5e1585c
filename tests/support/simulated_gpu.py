"""The simulated GPU, as tests see it."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIMULATED_GPU = Path(__file__).parents[1] / "simulated_gpu"
TIMEOUT_S = 60.0


class SimulatedGpu:
    """The simulated driver library, as tests see it; libcuda.c tells what can be set.

    Args:
        folder: holds the compiled libcuda.so.1.

    Attributes:
        path: that library.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "libcuda.so.1"
        # Whoever loads libcuda.so.1 in this process from now on gets this one.
        self._library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
        self._library.simulated_device_bytes.restype = ctypes.c_size_t
        self._library.simulated_allocations.restype = ctypes.c_size_t
        self._library.simulated_calls.restype = ctypes.c_size_t
        self._library.simulated_copies_to_host.restype = ctypes.c_size_t

    def set(self, words: str) -> None:
        """As EDGE_SIMULATED_CUDA, at once."""
        self._library.simulated_settings(words.encode())

    def reset(self) -> None:
        self._library.simulated_reset()

    @property
    def device_bytes(self) -> int:
        """Device memory that is allocated."""
        return self._library.simulated_device_bytes()

    def comes_to(self, device_bytes: int) -> bool:
        """Whether so much device memory is allocated once what is garbage has been freed."""
        end_s = time.monotonic() + TIMEOUT_S
        while self.device_bytes != device_bytes and time.monotonic() < end_s:
            time.sleep(0.01)
        return self.device_bytes == device_bytes

    def keep_busy(self, most_ms: int) -> None:
        """Whoever frees memory waits until `let_go_on`, or for `most_ms`."""
        self._library.simulated_keep_busy(most_ms)

    @contextmanager
    def nothing_is_freed(self) -> Iterator[None]:
        """Memory that other threads free meanwhile is freed afterwards: to free it ends all work
        of every stream, here as on a real GPU."""
        self.keep_busy(int(1000 * TIMEOUT_S))
        try:
            yield
        finally:
            self.keep_busy(0)

    def let_go_on(self, while_true: Callable[[], bool]) -> bool:
        """Let the GPU be idle once somebody waits for that; whether somebody did, `while_true`."""
        while while_true():
            if self._library.simulated_is_waited_for():
                self._library.simulated_go_on()
                return True
            time.sleep(0.001)
        return False

    @property
    def allocations(self) -> int:
        """How often memory was allocated, on the device or pinned."""
        return self._library.simulated_allocations()

    @property
    def graphs(self) -> int:
        """How many graphs there are, recorded or executable."""
        return self._library.simulated_graphs()

    @property
    def calls(self) -> int:
        """How often the driver was called."""
        return self._library.simulated_calls()

    @property
    def copies_to_host(self) -> int:
        return self._library.simulated_copies_to_host()

    def environment(self, words: str = "") -> dict[str, str]:
        """For a process of its own that shall find this GPU."""
        path = os.pathsep.join(filter(None, [str(SIMULATED_GPU), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self._folder),
            "PYTHONPATH": path,
            "EDGE_SIMULATED_CUDA": words,
        }
