"""What the simulation needs of the driver library, simulated too or real."""

from __future__ import annotations

import ctypes
from functools import cache

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Driver:
    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        # What a stream or a graph may still call is kept for as long as the process lives.
        self._calls: list[object] = []

    def is_here(self) -> bool:
        return self._cuda.cuInit(0) == 0

    def enter(self) -> None:
        """As the runtime API does: where no context is current, the first GPU's primary one is."""
        context = ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(context))
        if not context.value:
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            self._cuda.cuCtxPushCurrent_v2(context)

    def allocate(self, nbytes: int) -> Room | None:
        pointer = ctypes.c_uint64()
        if self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)):
            return None
        return Room(self._cuda, pointer.value)

    def give(self, stream: int, work: object) -> int:
        """Let `stream` call `work` in its turn; the driver's code."""
        call = CALL(lambda _: work())
        self._calls.append(call)
        return self._cuda.cuLaunchHostFunc(ctypes.c_void_p(stream), call, None)

    def synchronize(self, stream: int) -> int:
        return self._cuda.cuStreamSynchronize(ctypes.c_void_p(stream))

    def is_recording(self, stream: int) -> bool:
        # The third member of the simulated driver's Stream.
        return bool(ctypes.c_void_p.from_address(stream + 16).value)

    def is_lost(self) -> bool:
        return self._cuda.cuCtxGetDevice(ctypes.byref(ctypes.c_int())) != 0

    def break_device(self) -> None:
        """As a kernel that goes wrong does."""
        self._cuda.simulated_settings(b"fail=cuDeviceGetCount:719:0")
        self._cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))


class Room:
    """Device memory, freed with this; as with TensorRT's engines and contexts, no other thread of
    Python's runs meanwhile."""

    def __init__(self, cuda: ctypes.CDLL, pointer: int) -> None:
        self._cuda = cuda
        self._pointer = pointer

    def __del__(self) -> None:
        ctypes.PyDLL("libcuda.so.1").cuMemFree_v2(ctypes.c_uint64(self._pointer))


@cache
def driver() -> Driver:
    return Driver()
