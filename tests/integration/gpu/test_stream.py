"""Streams keep their own order, and only events tie them together."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import DeviceLost, InternalError
from edge_server.gpu.device import Device
from edge_server.gpu.memory import DeviceMemory, pinned_array
from edge_server.gpu.stream import GpuEvent, Module, Stream

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.stream import Priority


def test_copies_and_fills_of_one_stream_happen_in_turn(device: Device) -> None:
    stream = Stream(device)
    first, second = DeviceMemory(device, 6), DeviceMemory(device, 6)
    stream.fill(first, 9)
    stream.to_device(first, np.arange(4, dtype=np.uint8))
    stream.copy(second, first)
    stream.fill(first, 1)
    back = np.zeros(6, np.uint8)
    stream.to_host(back, second)
    stream.synchronize()
    assert back.tolist() == [0, 1, 2, 3, 9, 9]


def test_pageable_memory_is_read_before_a_copy_returns(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    source, back = np.full(4, 5, np.uint8), np.zeros(4, np.uint8)
    stream.to_device(memory, source)
    source[:] = 0
    stream.to_host(back, memory)
    stream.synchronize()
    assert back.tolist() == [5] * 4


def test_pinned_memory_is_filled_only_when_the_copy_is_over(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    stream.fill(memory, 7)
    back = pinned_array(device, (4,), np.uint8)
    back[:] = 0
    stream.to_host(back, memory)
    done = stream.record()
    assert back.tolist() == [0] * 4, "the simulation is too eager to catch a missing wait"
    done.wait()
    assert back.tolist() == [7] * 4


def test_a_stream_that_waits_for_an_event_sees_what_was_written_before_it(device: Device) -> None:
    writer, reader, memory = Stream(device), Stream(device), DeviceMemory(device, 4)
    reader.fill(memory, 1)
    reader.synchronize()
    early, late = pinned_array(device, (4,), np.uint8), pinned_array(device, (4,), np.uint8)
    writer.fill(memory, 2)
    written = writer.record()
    reader.to_host(early, memory)
    reader.synchronize()
    assert early.tolist() == [1] * 4, "the simulation is too eager to catch a missing wait"
    reader.wait(written)
    reader.to_host(late, memory)
    reader.synchronize()
    assert late.tolist() == [2] * 4


def test_an_event_never_set_counts_as_reached(device: Device) -> None:
    event = GpuEvent(device)
    assert event.reached()
    event.wait()
    Stream(device).wait(event)


def test_asking_an_event_never_waits(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    for byte in range(3):
        stream.fill(memory, byte)
    event = stream.record()
    assert not event.reached()
    event.wait()
    assert event.reached()


def test_what_does_not_fit_is_refused(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 4)
    with pytest.raises(ValueError, match="5 bytes do not fit into 4"):
        stream.to_device(memory, np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="5 bytes do not fit into 4"):
        stream.to_host(np.zeros(5, np.uint8), memory)
    with pytest.raises(ValueError, match="8 bytes do not fit into 4"):
        stream.copy(memory, DeviceMemory(device, 8))


def test_an_array_that_lies_otherwise_is_refused(device: Device) -> None:
    stream, memory = Stream(device), DeviceMemory(device, 24)
    turned = np.zeros((2, 3), np.float32).T
    with pytest.raises(ValueError, match=r"\(3, 2\) is not C-contiguous"):
        stream.to_device(memory, turned)
    with pytest.raises(ValueError, match=r"\(3, 2\) is not C-contiguous"):
        stream.to_host(turned, memory)


def test_what_leaves_its_memory_breaks_the_device(simulated_gpu: SimulatedGpu) -> None:
    device = Device()
    stream, memory = Stream(device), DeviceMemory(device, 4)
    memory.nbytes = 400
    stream.fill(memory, 1)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        stream.synchronize()
    device.close()


def test_a_launch_that_is_refused_is_an_error_of_its_own(device: Device) -> None:
    kernel = Module(device, b"").kernel("resize")
    with pytest.raises(InternalError, match=r"^GPU 0: run kernel resize: cuLaunchKernel failed"):
        Stream(device).launch(kernel, (1, 1, 1), (2048, 1, 1), b"")
    device.check()


@pytest.mark.parametrize(("priority", "number"), [("", 0), ("max", -5), ("min", 0)])
def test_a_stream_has_its_priority(device: Device, priority: Priority, number: int) -> None:
    found, handle = ctypes.c_int(), ctypes.c_void_p(Stream(device, priority).handle)
    with device:
        ctypes.CDLL("libcuda.so.1").cuStreamGetPriority(handle, ctypes.byref(found))
    assert found.value == number


def test_a_stream_goes_with_its_owner(device: Device, simulated_gpu: SimulatedGpu) -> None:
    Stream(device)
    device.finish_freeing()
    before = simulated_gpu.streams
    Stream(device)
    device.finish_freeing()
    assert simulated_gpu.streams == before
