"""Opening a GPU, its primary context, and what becomes of its errors."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.waiting import wait_until

from edge_server.errors import DeviceLost, InternalError, Unavailable
from edge_server.gpu.device import Devices, open_device
from edge_server.gpu.memory import DeviceMemory, MappedMemory, pinned_array
from edge_server.gpu.stream import GpuEvent, Module, Stream

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("init=100", r"^no CUDA device: cuInit returns 100 \(no CUDA-capable device is detected\)"),
        ("devices=0", r"video and render$"),
        ("init=801", r"801 .*video and render$"),
        ("init=803", r"803 .*restart the machine$"),
        ("init=999", r"999 .*video and render.*nvidia-modprobe -u .*restart the machine$"),
        ("init=34", r"CUDA driver is a stub library.*LD_LIBRARY_PATH$"),
        ("init=7", r"returns 7 .*kernel's log"),
        ("driver=10020", r"too old: it speaks CUDA 10\.2, 11\.4 is needed"),
        ("fail=cuDevicePrimaryCtxRetain:2:0", r"^GPU 0 cannot be used: .*out of memory"),
        ("fail=cuDeviceGet:46:0", r"^GPU 0 cannot be used: .*busy or unavailable"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(
    simulated_gpu: SimulatedGpu, words: str, text: str
) -> None:
    simulated_gpu.set(words)
    with pytest.raises(Unavailable, match=text):
        open_device()


@pytest.mark.parametrize(
    ("here", "asked", "text"),
    [(1, 1, "there is no GPU 1: this machine has only GPU 0"), (2, -1, "has GPU 0 to 1")],
)
def test_a_gpu_that_is_not_there_is_told(
    simulated_gpu: SimulatedGpu, here: int, asked: int, text: str
) -> None:
    simulated_gpu.set(f"devices={here}")
    with pytest.raises(Unavailable, match=text):
        open_device(asked)


def test_it_says_what_it_is(simulated_gpu: SimulatedGpu) -> None:
    simulated_gpu.set("compute=87,integrated=1,memory=1000000")
    device = open_device()
    assert (device.name, device.compute_capability) == ("Simulated GPU 0", (8, 7))
    assert (device.integrated, device.can_map_host_memory) == (True, True)
    assert (device.total_memory_bytes, str(device)) == (1000000, "GPU 0")
    device.close()


def test_it_is_current_inside_only_and_again_after_a_closer_circle(device: Device) -> None:
    allocate = device.driver.mem_alloc
    with device.current():
        with device.current():
            allocate(16)
        allocate(16)
    with pytest.raises(device.driver.Error, match="context"):
        allocate(16)


def test_it_is_current_again_inside_another_gpus_circle(simulated_gpu: SimulatedGpu) -> None:
    simulated_gpu.set("devices=2")
    first, second = devices = open_device(0), open_device(1)

    def current() -> int:
        index = ctypes.c_int()
        first.libcuda.call("cuCtxGetDevice", ctypes.byref(index))
        return index.value

    with first.current(), second.current():
        with first.current():
            assert current() == 0
        assert current() == 1
    for device in devices:
        device.close()


def test_every_thread_may_use_it_and_drop_what_is_on_it(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    things = [
        DeviceMemory(device, 64),
        Stream(device),
        GpuEvent(device),
        pinned_array(device, (4,), np.uint8),
        MappedMemory(device, (4,), np.uint8),
        Module(device, b"image"),
    ]
    worker = threading.Thread(
        target=lambda: (things.append(DeviceMemory(device, 32)), things.clear())
    )
    worker.start()
    worker.join()
    gc.collect()
    # pycuda warns of what it cannot free, and here warnings are errors.
    assert simulated_gpu.comes_to(0)


def test_pinned_memory_lives_as_long_as_any_view(device: Device) -> None:
    row = pinned_array(device, (4, 6), np.float32)[2:3]
    row[:] = 5.0
    gc.collect()
    assert row.tolist() == [[5.0] * 6]


def test_memory_that_is_short_is_told_with_its_size(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    simulated_gpu.set("memory=1000")
    with pytest.raises(
        Unavailable, match=r"^GPU 0: allocate 1001 bytes: cuMemAlloc failed: out of memory: fewer"
    ):
        DeviceMemory(device, 1001)
    DeviceMemory(device, 1000)


def test_an_error_says_what_was_tried(device: Device, simulated_gpu: SimulatedGpu) -> None:
    simulated_gpu.set("fail=cuStreamCreate:400:0")
    with pytest.raises(
        InternalError, match=r"^GPU 0: make a stream: cuStreamCreate failed: invalid resource"
    ):
        Stream(device)
    Stream(device)


@pytest.mark.parametrize("code", [214, 700, 702, 709, 710, 714, 718, 719, 999])
def test_a_sticky_error_is_a_lost_device(simulated_gpu: SimulatedGpu, code: int) -> None:
    lost: list[DeviceLost] = []
    device = open_device(on_lost=lost.append)
    stream = Stream(device)
    simulated_gpu.set(f"fail=kernel:{code}:0")
    stream.launch(Module(device, b"").kernel("k", "P"), (1,), (1,), DeviceMemory(device, 8))
    with pytest.raises(DeviceLost, match=rf"synchronize: .*CUDA error {code}\): the process must"):
        stream.synchronize()
    assert str(code) in str(lost[0])
    # So it stays.
    with pytest.raises(DeviceLost):
        DeviceMemory(device, 8)
    with pytest.raises(DeviceLost):
        device.check()
    device.close()


def test_a_lost_context_is_a_lost_device_already_where_it_is_made_current(
    simulated_gpu: SimulatedGpu,
) -> None:
    device = open_device()
    simulated_gpu.set("fail=cuCtxPushCurrent_v2:709:0")
    with pytest.raises(DeviceLost, match="context is destroyed"):
        DeviceMemory(device, 8)
    device.close()


def test_a_lost_context_that_cannot_be_left_is_on_no_threads_stack(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    # pycuda ends the whole process with a thread that has one there.
    with pytest.raises(DeviceLost, match="cuCtxPopCurrent failed"), device.current():
        simulated_gpu.set("fail=cuCtxPopCurrent_v2:719:0")
    assert device.driver.Context.get_current() is None
    # Nothing is freed any more, so that the thread that frees ends.
    wait_until(lambda: not device._freeing._thread.is_alive())


def test_what_went_wrong_inside_is_told_before_what_hindered_leaving(
    simulated_gpu: SimulatedGpu,
) -> None:
    lost: list[DeviceLost] = []
    device = open_device(on_lost=lost.append)
    simulated_gpu.set("fail=cuCtxPopCurrent_v2:719:0")
    with pytest.raises(DeviceLost, match="allocate"), device.current("allocate"):
        raise device.driver.Error("cuMemAlloc failed: unspecified launch failure")
    assert "cuMemAlloc" in str(lost[0])
    device.close()


def test_what_is_dropped_after_the_device_was_closed_is_no_error(
    simulated_gpu: SimulatedGpu,
) -> None:
    device = open_device()
    things = [Stream(device), DeviceMemory(device, 8), pinned_array(device, (8,), np.int8)]
    device.close()
    device.close()
    things.clear()
    gc.collect()


def test_what_another_thread_drops_while_the_device_closes_is_freed(
    simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device()
    kept, dropped = Stream(device), [Stream(device)]
    finish_freeing = device._freeing.close

    def drop_meanwhile() -> None:
        worker = threading.Thread(target=dropped.clear)
        worker.start()
        worker.join()
        finish_freeing()

    monkeypatch.setattr(device._freeing, "close", drop_meanwhile)
    device.close()
    # pycuda warns of what it cannot free, and here warnings are errors.
    gc.collect()
    assert kept._box == []
    assert device._held == {}


def test_an_error_keeps_nothing_of_its_callers_until_a_garbage_collection(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    def fail() -> weakref.ref[Stream]:
        stream = Stream(device)
        simulated_gpu.set("fail=cuEventRecord:400:0")
        with suppress(InternalError):
            stream.synchronize()
        return weakref.ref(stream)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_gpus_are_opened_once(simulated_gpu: SimulatedGpu) -> None:
    simulated_gpu.set("devices=2")
    devices = Devices()
    assert (devices.count, devices.reason) == (2, "")
    assert devices.gpu(1) is devices.gpu(1) is not devices.gpu(0)
    devices.close()


def test_without_a_gpu_each_wish_says_why(simulated_gpu: SimulatedGpu) -> None:
    simulated_gpu.set("devices=0")
    devices = Devices()
    assert devices.count == 0
    assert "no CUDA-capable device" in devices.reason
    with pytest.raises(Unavailable, match="no CUDA-capable device"):
        devices.gpu()
    devices.check()
    devices.close()


@pytest.mark.parametrize("how", ["driver", "file"])
def test_a_gpu_that_comes_late_asks_for_a_new_process(
    simulated_gpu: SimulatedGpu, how: str
) -> None:
    simulated_gpu.set("init=100")
    files = ["/dev/nvmap"]
    devices = Devices(lambda: files, look_s=0.0)
    assert devices.awaited
    devices.check()
    if how == "file":
        files.append("/dev/nvgpu/igpu0/ctrl")
        words = "/dev/nvgpu/igpu0/ctrl came after this process"
    else:
        simulated_gpu.reset()
        words = "its driver works"
    with pytest.raises(
        DeviceLost, match=f"the GPU has come: {words}: restart the process to use it"
    ):
        devices.check()
    # Only of a machine that is built for its GPU.
    assert not Devices().awaited


def test_whichever_thread_meets_a_lost_gpu_all_hear_of_it(simulated_gpu: SimulatedGpu) -> None:
    devices = Devices()
    device = devices.gpu()
    simulated_gpu.set("fail=cuMemAlloc_v2:700:0")
    failures: list[DeviceLost] = []

    def request() -> None:
        with pytest.raises(DeviceLost) as caught:
            DeviceMemory(device, 8)
        failures.append(caught.value)

    devices.check()
    worker = threading.Thread(target=request)
    worker.start()
    worker.join()
    with pytest.raises(DeviceLost, match="illegal memory access") as caught:
        devices.check()
    assert caught.value is failures[0]
    devices.close()
