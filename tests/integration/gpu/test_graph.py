"""Graphs: recorded once, run as often as wanted; absent, they are a reason.

Where cuda-bindings is installed, the real one runs over the simulated driver.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import DeviceLost, InternalError, Unavailable
from edge_server.gpu.memory import DeviceMemory, pinned_array
from edge_server.gpu.stream import Stream, record_graph

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device

with_bindings = pytest.mark.skipif(
    not importlib.util.find_spec("cuda"), reason="no cuda-bindings here"
)


def test_without_cuda_bindings_the_reason_is_told(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match="no CUDA graphs") as caught:
        record_graph(Stream(device), lambda: None)
    assert str(caught.value).endswith("; pip install cuda-bindings, of the driver's major version")


@with_bindings
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

    graph = record_graph(stream, work)
    back[:] = 0
    stream.synchronize()
    assert back.tolist() == [0] * 4
    for expected in (1, 2):
        graph.launch(stream)
        stream.synchronize()
        assert back.tolist() == [expected] * 4
    graph.close()


@with_bindings
def test_a_stream_records_no_longer_after_work_that_failed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    destroyed = []
    monkeypatch.setattr(
        "cuda.bindings.driver.cuGraphDestroy", lambda graph: (destroyed.append(graph),)
    )
    with pytest.raises(ZeroDivisionError):
        record_graph(stream, lambda: 1 / 0)
    assert len(destroyed) == 1
    back = np.zeros(4, np.uint8)
    stream.fill(memory, 3)
    stream.to_host(back, memory)
    stream.synchronize()
    assert back.tolist() == [3] * 4


@with_bindings
def test_memory_that_is_freed_while_work_is_recorded_does_not_spoil_it(device: Device) -> None:
    stream, memory, garbage = Stream(device), DeviceMemory(device, 4), [DeviceMemory(device, 4)]

    def work() -> None:
        garbage.clear()
        stream.fill(memory, 1)

    record_graph(stream, work).launch(stream)
    stream.synchronize()


@with_bindings
@pytest.mark.parametrize(
    ("code", "error"), [(900, InternalError), (801, InternalError), (719, DeviceLost)]
)
def test_what_cannot_be_recorded_is_told(
    device: Device, simulated_gpu: SimulatedGpu, code: int, error: type[Exception]
) -> None:
    stream = Stream(device)
    simulated_gpu.set(f"fail=cuGraphInstantiateWithFlags:{code}:0")
    with pytest.raises(error, match="GPU 0: record a graph: cuGraphInstantiate failed"):
        record_graph(stream, lambda: None)


@with_bindings
def test_a_graph_may_be_dropped(device: Device) -> None:
    record_graph(Stream(device), lambda: None)
    gc.collect()
