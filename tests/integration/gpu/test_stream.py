"""Streams keep their own order, and only events tie them together."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from edge_server.errors import DeviceLost, InternalError
from edge_server.gpu.device import open_device
from edge_server.gpu.memory import DeviceMemory, pinned_array
from edge_server.gpu.stream import GpuEvent, Module, PriorityStream, Stream

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device


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
    device = open_device()
    stream, memory = Stream(device), DeviceMemory(device, 4)
    memory.nbytes = 400
    stream.fill(memory, 1)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        stream.synchronize()
    device.close()


def test_a_launch_that_is_refused_is_an_error_of_its_own(device: Device) -> None:
    kernel = Module(device, b"").kernel("resize", "P")
    with pytest.raises(InternalError, match=r"^GPU 0: run kernel resize: cuLaunchKernel failed"):
        Stream(device).launch(kernel, (1,), (2048,), DeviceMemory(device, 4))
    device.check()


def test_streams_of_other_libraries_are_waited_for_and_held_back(device: Device) -> None:
    ours, theirs, memory = Stream(device), Stream(device), DeviceMemory(device, 2)
    theirs.fill(memory, 3)
    ours.wait_for_handle(theirs.handle)
    back = pinned_array(device, (2,), np.uint8)
    ours.to_host(back, memory)
    ours.synchronize()
    assert back.tolist() == [3, 3]

    ours.fill(memory, 4)
    ours.hold_back_handle(theirs.handle)
    theirs.to_host(back, memory)
    theirs.synchronize()
    assert back.tolist() == [4, 4]


def test_a_stream_handle_that_cannot_be_waited_for_is_told(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    simulated_gpu.set("fail=cuStreamWaitEvent:400:0")
    ours, theirs = Stream(device), Stream(device)
    with pytest.raises(InternalError, match=r"wait across libraries: .*invalid resource handle"):
        ours.wait_for_handle(theirs.handle)


@pytest.mark.parametrize(("priority", "number"), [("max", -5), ("min", 0)])
def test_another_librarys_work_has_its_priority_and_its_place_in_the_stream(
    device: Device, priority: Literal["max", "min"], number: int
) -> None:
    stream, other, memory = (
        Stream(device),
        PriorityStream(device, priority),
        DeviceMemory(device, 4),
    )
    found = ctypes.c_int()
    handle = ctypes.c_void_p(other.handle)
    with device.current():
        device.libcuda.call("cuStreamGetPriority", handle, ctypes.byref(found))
    assert found.value == number
    stream.fill(memory, 1)
    other.begin(stream)
    # As a library does that has the raw handle only.
    with device.current():
        device.libcuda.call(
            "cuMemsetD8Async",
            ctypes.c_uint64(memory.pointer),
            ctypes.c_ubyte(2),
            ctypes.c_size_t(2),
            handle,
        )
    other.end(stream)
    back = pinned_array(device, (4,), np.uint8)
    stream.to_host(back, memory)
    stream.synchronize()
    assert back.tolist() == [2, 2, 1, 1]


def test_another_librarys_stream_goes_with_its_owner(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = []
    monkeypatch.setattr(device, "free", lambda function, _: freed.append(function))
    PriorityStream(device, "max")
    gc.collect()
    assert freed == ["cuStreamDestroy_v2"]
