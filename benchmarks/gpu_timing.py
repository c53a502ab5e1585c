"""Times of work on a GPU, by its own clock, and the same work's shape for who compares."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING

from edge_server.gpu.memory import DeviceMemory
from edge_server.gpu.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.device import Device

# Pieces of work between two events, and how often that is measured.
PIECES, REPEATS = 40, 15


class GpuClock:
    """Times pieces of work that are given to one stream.

    The stream is kept busy while the host gives it the pieces, so that they run one right behind
    the other however slow the host is.

    Args:
        quick: a sketch, whose figures say nothing.
    """

    def __init__(self, device: Device, *, quick: bool = False) -> None:
        self.device = device
        self.repeats = 1 if quick else REPEATS
        self._pieces = 2 if quick else PIECES
        self.stream = Stream(device)
        self._begin, self._end = (
            device.make(self, "make a timed event", "cuEventCreate", "cuEventDestroy_v2", 0)[0]
            for _ in range(2)
        )
        nbytes = 1 << 20 if quick else min(1 << 30, device.total_memory_bytes // 16)
        self._busy = DeviceMemory(device, nbytes)
        self._busy_ms = 0.0
        for _ in range(2):
            self._busy_ms = self._ms(lambda: self.stream.fill(self._busy))

    def piece_us(self, piece: Callable[[int], None]) -> float:
        """What a piece takes; the median of `repeats`.

        Args:
            piece: gives its work to `stream`; its number lets it turn to other memory each time.
        """

        def pieces() -> None:
            for number in range(self._pieces):
                piece(number)

        with self.device:
            began = time.perf_counter()
            pieces()
            host_ms = 1e3 * (time.perf_counter() - began)
            self.stream.synchronize()
            fills = 1 + int(2 * host_ms / max(self._busy_ms, 1e-3))
            times_ms = [self._ms(pieces, busy=min(fills, 200)) for _ in range(self.repeats)]
        return 1e3 * statistics.median(times_ms) / self._pieces

    def _ms(self, work: Callable[[], None], busy: int = 0) -> float:
        for _ in range(busy):
            self.stream.fill(self._busy)
        with self.device:
            self._record(self._begin)
            work()
            self._record(self._end)
            self.device.call("measure", "cuEventSynchronize", self._end)
            ms = ctypes.c_float()
            begin, end = ctypes.c_void_p(self._begin), ctypes.c_void_p(self._end)
            ctypes.CDLL("libcuda.so.1").cuEventElapsedTime(ctypes.byref(ms), begin, end)
            return ms.value

    def _record(self, event: int) -> None:
        self.device.call("measure", "cuEventRecord", event, self.stream.handle)


def host_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of `work` on the host, warmed up."""
    work()
    times_s = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times_s)
