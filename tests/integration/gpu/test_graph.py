"""Graphs: recorded once, run as often as wanted; the driver is simulated."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.simulated_gpu import SIMULATED_GPU

from edge_server.errors import DeviceLost, InternalError
from edge_server.gpu.memory import DeviceMemory, pinned_array
from edge_server.gpu.stream import PROTOTYPES, Stream, record_graph

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device

HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
LETTERS = {
    **dict.fromkeys((ctypes.c_void_p, "CUstream", "CUgraph", "CUgraphExec"), "handle"),
    **dict.fromkeys((ctypes.byref, "CUgraph*", "CUgraphExec*"), "returned handle"),
    **dict.fromkeys((ctypes.c_int, "CUstreamCaptureMode", "int"), "32 bits"),
    **dict.fromkeys((ctypes.c_ulonglong, "unsigned long long"), "64 bits"),
    # The simulation's own.
    **dict.fromkeys(("Stream*", "Graph*"), "handle"),
    "Graph**": "returned handle",
}


def declared(text: str, function: re.Pattern[str]) -> dict[str, list[str]]:
    """Function → what each of its parameters is."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    found: dict[str, list[str]] = {}
    for name, parameters in function.findall(text):
        kinds = [re.sub(r"\s*(\w+)$|\s+(?=\*)", "", each.strip()) for each in parameters.split(",")]
        # A header declares the versions of former headers behind the present ones.
        found.setdefault(name, [LETTERS.get(kind, kind) for kind in kinds])
    return found


def test_the_simulation_takes_what_the_driver_is_given() -> None:
    text = (SIMULATED_GPU / "libcuda.c").read_text()
    simulated = declared(text, re.compile(r"^Result (cu\w+)\(([^)]*)\)", re.MULTILINE))
    for name, kinds in PROTOTYPES.items():
        assert simulated[name] == [LETTERS[kind] for kind in kinds], name


@pytest.mark.skipif(not HEADERS, reason="no CUDA toolkit here")
def test_the_driver_is_given_what_nvidias_header_declares() -> None:
    text = HEADERS[-1].read_text(errors="replace")
    header = declared(text, re.compile(r"^CUresult CUDAAPI (cu\w+)\(([^)]*)\);", re.MULTILINE))
    # The header renames a function to the version that the library exports.
    renamed = dict(re.findall(r"#define (cu\w+)\s+(?:\w+\()?(cu\w+)", text))
    exported = {renamed.get(name, name): kinds for name, kinds in header.items()}
    for name, kinds in PROTOTYPES.items():
        assert exported[name] == [LETTERS[kind] for kind in kinds], name


def test_recorded_work_runs_with_every_launch_and_not_before(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    stream, memory, back = (
        Stream(device),
        DeviceMemory(device, 4),
        pinned_array(device, (4,), np.uint8),
    )
    stream.fill(memory, 1)

    def work() -> None:
        stream.to_host(back, memory)
        stream.fill(memory, 2)

    graph = record_graph(stream, work)
    back[:] = 0
    stream.synchronize()
    assert back.tolist() == [0] * 4
    for expected in (1, 2):
        graph.launch(stream)
        stream.synchronize()
        assert back.tolist() == [expected] * 4
    # What was recorded is gone, and what is launched goes with `close`.
    assert simulated_gpu.graphs == 1
    graph.close()
    assert simulated_gpu.graphs == 0


def test_a_stream_records_no_longer_after_work_that_failed(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    with pytest.raises(ZeroDivisionError):
        record_graph(stream, lambda: 1 / 0)
    assert simulated_gpu.graphs == 0
    back = np.zeros(4, np.uint8)
    stream.fill(memory, 3)
    stream.to_host(back, memory)
    stream.synchronize()
    assert back.tolist() == [3] * 4


def test_memory_that_is_freed_while_work_is_recorded_does_not_spoil_it(device: Device) -> None:
    stream, memory, garbage = Stream(device), DeviceMemory(device, 4), [DeviceMemory(device, 4)]

    def work() -> None:
        garbage.clear()
        stream.fill(memory, 1)

    record_graph(stream, work).launch(stream)
    stream.synchronize()


def test_a_thread_that_allocates_while_work_is_recorded_does_not_spoil_it(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)

    def work() -> None:
        stream.fill(memory, 1)
        other = threading.Thread(target=lambda: DeviceMemory(device, 4096))
        other.start()
        other.join()
        stream.fill(memory, 2)

    record_graph(stream, work).launch(stream)
    stream.synchronize()


@pytest.mark.parametrize(
    ("code", "error"), [(900, InternalError), (801, InternalError), (719, DeviceLost)]
)
@pytest.mark.parametrize("name", [*PROTOTYPES][:3])
def test_what_cannot_be_recorded_is_reported_and_leaves_nothing(
    device: Device, simulated_gpu: SimulatedGpu, name: str, code: int, error: type[Exception]
) -> None:
    stream = Stream(device)
    simulated_gpu.set(f"fail={name}:{code}:0")
    said = f"GPU 0: record a graph: {name.removesuffix('_v2')} failed"
    with pytest.raises(error, match=said):
        record_graph(stream, lambda: None)
    # A stream that goes on recording is destroyed with it.
    assert simulated_gpu.graphs == int(name == "cuStreamEndCapture")


def test_a_graph_may_be_dropped(device: Device, simulated_gpu: SimulatedGpu) -> None:
    record_graph(Stream(device), lambda: None)
    gc.collect()
    assert simulated_gpu.graphs == 0


def test_a_graph_that_outlives_its_device_went_with_it(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    graph = record_graph(Stream(device), lambda: None)
    device.close()
    assert simulated_gpu.graphs == 0
    graph.close()
