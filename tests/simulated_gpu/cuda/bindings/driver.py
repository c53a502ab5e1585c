"""SIMULATION of cuda.bindings.driver, as far as edge_server calls it: graphs.

What it keeps of the real one: every function answers a tuple, whose first is the error code. What
the calls do is up to the library libcuda.so.1. Where the real one is installed it is tested too,
over the simulated driver.
"""

from __future__ import annotations

import ctypes
import enum

_library = ctypes.CDLL("libcuda.so.1")


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


def cuStreamBeginCapture(hStream, mode):  # noqa: N802, N803 - the driver's names
    return (_library.cuStreamBeginCapture_v2(ctypes.c_void_p(hStream), int(mode)),)


def cuStreamEndCapture(hStream):  # noqa: N802, N803
    graph = ctypes.c_void_p()
    code = _library.cuStreamEndCapture(ctypes.c_void_p(hStream), ctypes.byref(graph))
    return code, graph.value


def cuGraphInstantiate(graph, flags):  # noqa: N802
    executable = ctypes.c_void_p()
    code = _library.cuGraphInstantiateWithFlags(
        ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_ulonglong(flags)
    )
    return code, executable.value


def cuGraphLaunch(hGraphExec, hStream):  # noqa: N802, N803
    return (_library.cuGraphLaunch(ctypes.c_void_p(hGraphExec), ctypes.c_void_p(hStream)),)


def cuGraphDestroy(graph):  # noqa: N802
    return (_library.cuGraphDestroy(ctypes.c_void_p(graph)),)


def cuGraphExecDestroy(hGraphExec):  # noqa: N802, N803
    return (_library.cuGraphExecDestroy(ctypes.c_void_p(hGraphExec)),)
