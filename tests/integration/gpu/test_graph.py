"""Graphs: recorded once, run as often as wanted."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import DeviceLost, InternalError
from edge_server.gpu.memory import DeviceMemory, pinned_array
from edge_server.gpu.stream import Graph, Stream

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device


def test_recorded_work_runs_with_every_launch_and_not_before(device: Device) -> None:
    stream, memory, back = (
        Stream(device),
        DeviceMemory(device, 4),
        pinned_array(device, (4,), np.uint8),
    )
    stream.fill(memory, 1)

    def work() -> None:
        stream.to_host(back, memory)
        stream.fill(memory, 2)

    graph = Graph(stream, work)
    back[:] = 0
    stream.synchronize()
    assert back.tolist() == [0] * 4
    for expected in (1, 2):
        graph.launch(stream)
        stream.synchronize()
        assert back.tolist() == [expected] * 4
    graph.close()


def test_a_stream_records_no_longer_after_work_that_failed(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    with pytest.raises(ZeroDivisionError):
        Graph(stream, lambda: 1 / 0)
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

    Graph(stream, work).launch(stream)
    stream.synchronize()


@pytest.mark.parametrize(
    ("code", "error"), [(900, InternalError), (801, InternalError), (719, DeviceLost)]
)
def test_what_cannot_be_recorded_is_told(
    device: Device, simulated_gpu: SimulatedGpu, code: int, error: type[Exception]
) -> None:
    stream = Stream(device)
    simulated_gpu.set(f"fail=cuGraphInstantiateWithFlags:{code}:0")
    with pytest.raises(error, match="GPU 0: record a graph: cuGraphInstantiateWithFlags failed"):
        Graph(stream, lambda: None)


def test_a_graph_may_be_dropped(device: Device) -> None:
    Graph(Stream(device), lambda: None)
    gc.collect()
