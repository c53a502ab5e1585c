"""SIMULATION of pycuda.driver, as far as edge_server calls it, with no compiler needed.

What it keeps of the real one: the names, the parameters, the classes of errors and their texts,
one context at a time per thread, that nothing is made without a current context, that what
is dropped elsewhere than in the thread that retained the context leaks with a warning, and in which
calls no other thread of Python's runs. What the calls do is up to the library libcuda.so.1: a
simulation too (libcuda.c beside this folder), or a real driver.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings

import numpy as np

try:
    _library = ctypes.CDLL("libcuda.so.1")
    _holding = ctypes.PyDLL("libcuda.so.1")
except OSError as error:
    raise ImportError(str(error)) from None


class Error(Exception):
    pass


class MemoryError(Error):  # noqa: A001 - pycuda's name
    pass


class LogicError(Error):
    pass


class LaunchError(Error):
    pass


class RuntimeError(Error):  # noqa: A001 - pycuda's name
    pass


_CLASSES = {
    2: MemoryError,
    100: RuntimeError,
    209: RuntimeError,
    214: RuntimeError,
    301: RuntimeError,
    600: RuntimeError,
    701: LaunchError,
    702: LaunchError,
    703: LaunchError,
    719: LaunchError,
    999: Error,
}
_NOT_READY = 600
# Functions that have another name in the library than in cuda.h.
_SECOND_VERSION = {
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuDeviceTotalMem",
    "cuEventDestroy",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostGetDevicePointer",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamDestroy",
}


# In these pycuda keeps the interpreter's lock: they are plain CUDAPP_CALL_GUARDED in its cuda.hpp.
_HOLDS_THE_LOCK = {
    "cuDevicePrimaryCtxRetain",
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuModuleLoadDataEx",
}


def _code(name, *arguments):
    symbol = f"{name}_v2" if name in _SECOND_VERSION else name
    if name not in _HOLDS_THE_LOCK:
        return getattr(_library, symbol)(*arguments)
    if not hasattr(_library, "simulated_lock"):
        return getattr(_holding, symbol)(*arguments)
    _library.simulated_lock()
    try:
        return getattr(_holding, symbol)(*arguments)
    finally:
        _library.simulated_unlock()


def _failure(name, code, more=""):
    text = ctypes.c_char_p()
    _library.cuGetErrorString(code, ctypes.byref(text))
    return _CLASSES.get(code, LogicError)(f"{name} failed: {text.value.decode()}{more}")


def _call(name, *arguments):
    if code := _code(name, *arguments):
        raise _failure(name, code)


def _made(kind, name, *arguments):
    """What a call writes into its first argument."""
    made = kind()
    _call(name, ctypes.byref(made), *arguments)
    return made.value


def init(flags=0):
    _call("cuInit", flags)


class _Flags(int):
    """A value of one of pycuda's enumerations."""


class event_flags:  # noqa: N801 - pycuda's name
    DEFAULT = _Flags(0)
    BLOCKING_SYNC = _Flags(1)
    DISABLE_TIMING = _Flags(2)
    INTERPROCESS = _Flags(4)


class host_alloc_flags:  # noqa: N801 - pycuda's name
    PORTABLE = 1
    DEVICEMAP = 2
    WRITECOMBINED = 4


class device_attribute:  # noqa: N801 - pycuda's name
    INTEGRATED = _Flags(18)
    CAN_MAP_HOST_MEMORY = _Flags(19)


class Device:
    def __init__(self, arg2):
        self._device = _made(ctypes.c_int, "cuDeviceGet", arg2)

    @staticmethod
    def count():
        return _made(ctypes.c_int, "cuDeviceGetCount")

    def name(self):
        name = ctypes.create_string_buffer(256)
        _call("cuDeviceGetName", name, 256, self._device)
        return name.value.decode()

    def compute_capability(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        _call("cuDeviceComputeCapability", ctypes.byref(major), ctypes.byref(minor), self._device)
        return major.value, minor.value

    def total_memory(self):
        return _made(ctypes.c_size_t, "cuDeviceTotalMem", self._device)

    def get_attribute(self, arg2):
        return _made(ctypes.c_int, "cuDeviceGetAttribute", arg2, self._device)

    def retain_primary_context(self):
        handle = _made(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", self._device)
        return Context(handle, self._device)


class _Stack(threading.local):
    """The contexts of one thread; only the topmost is the driver's."""

    def __init__(self):
        self.contexts = []

    def current(self):
        while self.contexts and not self.contexts[-1].valid:
            self.contexts.pop()
        return self.contexts[-1] if self.contexts else None


_stack = _Stack()


class Context:
    def __init__(self, handle, device):
        self.valid = True
        self.thread = threading.get_ident()
        self._handle = ctypes.c_void_p(handle)
        self._device = device

    def push(self):
        if _stack.contexts:
            _made(ctypes.c_void_p, "cuCtxPopCurrent")
        _call("cuCtxPushCurrent", self._handle)
        _stack.contexts.append(self)

    @staticmethod
    def pop():
        if not _stack.contexts:
            raise _failure("context::pop", 201, " - cannot pop non-current context")
        _made(ctypes.c_void_p, "cuCtxPopCurrent")
        _stack.contexts.pop()
        if below := _stack.current():
            _call("cuCtxPushCurrent", below._handle)

    @staticmethod
    def get_current():
        return _stack.current()

    def detach(self):
        if not self.valid:
            raise _failure("context::detach", 201, " - cannot detach from invalid context")
        was_current = _stack.current() is self
        if was_current or self.thread == threading.get_ident():
            if not was_current:
                _code("cuCtxPushCurrent", self._handle)
            _code("cuDevicePrimaryCtxRelease", self._device)
        self.valid = False
        if was_current and (below := _stack.current()):
            _call("cuCtxPushCurrent", below._handle)

    @staticmethod
    def synchronize():
        _call("cuCtxSynchronize")


class _InContext:
    """What belongs to the context that was current when it was made."""

    _freed_by = ""
    _handle = None

    def _enter(self):
        self._ward = _stack.current()
        if self._ward is None:
            raise _failure("explicit_context_dependent", 201, " - no currently active context?")

    def _free(self):
        ward = self._ward
        if not ward.valid:
            return
        switch = _stack.current() is not ward
        if switch and ward.thread != threading.get_ident():
            warnings.warn(
                f"{type(self).__name__} in out-of-thread context could not be cleaned up",
                UserWarning,
                stacklevel=2,
            )
            return
        if switch:
            ward.push()
        # pycuda prints what goes wrong here.
        _code(self._freed_by, self._handle)
        if switch:
            Context.pop()

    def __del__(self):
        if self._handle is not None and self._freed_by:
            self._free()
            self._handle = None


class Event(_InContext):
    _freed_by = "cuEventDestroy"

    def __init__(self, flags=0):
        self._enter()
        self._handle = ctypes.c_void_p(_made(ctypes.c_void_p, "cuEventCreate", flags))

    def record(self, stream=None):
        _call("cuEventRecord", self._handle, _raw(stream))
        return self

    def synchronize(self):
        _call("cuEventSynchronize", self._handle)
        return self

    def query(self):
        code = _code("cuEventQuery", self._handle)
        if code not in (0, _NOT_READY):
            raise _failure("cuEventQuery", code)
        return code == 0

    def time_since(self, arg2):
        # The second came with CUDA 12.8.
        name = "cuEventElapsedTime"
        newer = f"{name}_v2"
        name = newer if hasattr(_library, newer) else name
        return _made(ctypes.c_float, name, arg2._handle, self._handle)


class Stream(_InContext):
    _freed_by = "cuStreamDestroy"

    def __init__(self, flags=0):
        self._enter()
        self._handle = ctypes.c_void_p(_made(ctypes.c_void_p, "cuStreamCreate", flags))

    @property
    def handle(self):
        return self._handle.value

    def wait_for_event(self, arg2):
        _call("cuStreamWaitEvent", self._handle, arg2._handle, 0)


def _raw(stream):
    return ctypes.c_void_p(0) if stream is None else stream._handle


class DeviceAllocation(_InContext):
    _freed_by = "cuMemFree"

    def __init__(self, handle):
        self._enter()
        self._handle = handle

    def __int__(self):
        return self._handle.value


def mem_alloc(arg1):
    pointer = _made(ctypes.c_uint64, "cuMemAlloc", ctypes.c_size_t(arg1))
    return DeviceAllocation(ctypes.c_uint64(pointer))


class PagelockedHostAllocation(_InContext):
    _freed_by = "cuMemFreeHost"

    def __init__(self, shape, dtype, flags):
        self._enter()
        nbytes = int(np.prod(shape)) * dtype.itemsize
        made = _made(ctypes.c_void_p, "cuMemHostAlloc", ctypes.c_size_t(nbytes), flags)
        self._handle = ctypes.c_void_p(made)
        # numpy takes what has this for the base of the array, as pycuda's arrays have it.
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (made, False),
            "version": 3,
        }

    def get_device_pointer(self):
        return _made(ctypes.c_uint64, "cuMemHostGetDevicePointer", self._handle, 0)


def pagelocked_empty(shape, dtype, order="C", mem_flags=0):
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return np.asarray(PagelockedHostAllocation(shape, np.dtype(dtype), mem_flags))


def _address(buffer, *, writable):
    array = np.asarray(buffer)
    if not array.flags.c_contiguous and not array.flags.f_contiguous:
        raise ValueError("ndarray is not contiguous")
    if writable and not array.flags.writeable:
        raise ValueError("buffer source array is read-only")
    return ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)


def memcpy_htod_async(dest, src, stream=None):
    address, nbytes = _address(src, writable=False)
    _call("cuMemcpyHtoDAsync", ctypes.c_uint64(int(dest)), address, nbytes, _raw(stream))


def memcpy_dtoh_async(dest, src, stream=None):
    address, nbytes = _address(dest, writable=True)
    _call("cuMemcpyDtoHAsync", address, ctypes.c_uint64(int(src)), nbytes, _raw(stream))


def memcpy_dtod_async(dest, src, size, stream=None):
    to, begin = ctypes.c_uint64(int(dest)), ctypes.c_uint64(int(src))
    _call("cuMemcpyDtoDAsync", to, begin, ctypes.c_size_t(size), _raw(stream))


def memset_d8_async(dest, data, size, stream=None):
    to = ctypes.c_uint64(int(dest))
    _call("cuMemsetD8Async", to, ctypes.c_ubyte(data), ctypes.c_size_t(size), _raw(stream))


class Module(_InContext):
    _freed_by = "cuModuleUnload"

    def __init__(self, image):
        self._enter()
        made = _made(ctypes.c_void_p, "cuModuleLoadDataEx", image, 0, None, None)
        self._handle = ctypes.c_void_p(made)

    def get_function(self, name):
        found = _made(ctypes.c_void_p, "cuModuleGetFunction", self._handle, name.encode())
        return Function(found, self)


def module_from_buffer(buffer, options=(), message_handler=None):
    return Module(bytes(buffer))


class Function:
    def __init__(self, handle, module):
        self._handle = ctypes.c_void_p(handle)
        self._module = module

    def prepare(self, arg_types, texrefs=None):
        self.arg_format = arg_types
        return self

    def prepared_async_call(self, grid, block, stream, *args, shared_size=0):
        if len(block) != 3:
            raise TypeError("Function._set_block_shape: did not match C++ signature")
        packed = ctypes.create_string_buffer(struct.pack(self.arg_format, *args))
        nbytes = ctypes.c_size_t(struct.calcsize(self.arg_format))
        extra = (ctypes.c_void_p * 5)(
            1, ctypes.addressof(packed), 2, ctypes.addressof(nbytes), None
        )
        shape = (*grid, 1, 1)[:3] + block
        _call("cuLaunchKernel", self._handle, *shape, shared_size, _raw(stream), None, extra)
