"""What the simulated driver takes for granted holds on the real one."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import Unavailable
from edge_server.gpu.memory import BufferPool, DeviceMemory, pinned_array
from edge_server.gpu.stream import Stream, record_graph

if TYPE_CHECKING:
    from edge_server.gpu.device import Device

pytestmark = pytest.mark.hardware

MIB = 1 << 20


def test_bytes_come_back_as_they_went(device: Device) -> None:
    stream = Stream(device)
    sent = np.random.default_rng(0).integers(0, 256, 3 * MIB, np.uint8)
    first, second = DeviceMemory(device, sent.nbytes), DeviceMemory(device, sent.nbytes)
    stream.to_device(first, sent)
    stream.copy(second, first)
    back = pinned_array(device, sent.shape, np.uint8)
    stream.to_host(back, second)
    stream.synchronize()
    np.testing.assert_array_equal(back, sent)


def test_a_stream_waits_for_an_event_of_another(device: Device) -> None:
    writer, reader = Stream(device), Stream(device)
    large, small = DeviceMemory(device, 256 * MIB), DeviceMemory(device, 4)
    back = pinned_array(device, (4,), np.uint8)
    for byte in range(8):
        # What is waited for takes its time.
        writer.fill(large, byte)
        writer.fill(small, byte)
        reader.wait(writer.record())
        reader.to_host(back, small)
        reader.synchronize()
        assert back.tolist() == [byte] * 4


def test_a_pool_reuses_memory_under_its_readers_feet_never(device: Device) -> None:
    pool = BufferPool(device, 64 * MIB, "test")
    writer, reader = Stream(device), Stream(device)
    kept = []
    for byte in range(1, 40):
        array = pool.take(writer, (4 * MIB,), np.uint8)
        writer.fill(array, byte)
        array.written(writer)
        copy = DeviceMemory(device, array.nbytes)
        reader.wait(array.ready)
        reader.copy(copy, array)
        array.read_by(reader.record())
        kept.append((byte, copy))
        del array
    assert pool.held_bytes == 4 * MIB
    back = np.empty(4 * MIB, np.uint8)
    for byte, copy in kept:
        reader.to_host(back, copy)
        reader.synchronize()
        assert (back == byte).all()


def test_every_thread_may_use_it_and_drop_what_is_on_it(device: Device) -> None:
    wrong: list[str] = []

    def work(byte: int) -> None:
        stream = Stream(device)
        for _ in range(20):
            memory = DeviceMemory(device, MIB)
            back = np.empty(MIB, np.uint8)
            stream.fill(memory, byte)
            stream.to_host(back, memory)
            stream.synchronize()
            if not (back == byte).all():
                wrong.append(f"thread {byte}")

    threads = [threading.Thread(target=work, args=(byte,)) for byte in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_that_there_is_not_is_told(device: Device) -> None:
    with pytest.raises(Unavailable, match=r"GPU 0: allocate \d+ bytes: .*out of memory"):
        DeviceMemory(device, 4 * device.total_memory_bytes)
    device.check()


LOSE = """
from edge_server.gpu.device import Devices
from edge_server.gpu.preprocess_kernel import FrameAddress, FrameLayout, FramePreprocess
from edge_server.pixels import PixelFormat
from edge_server.gpu.preprocess_kernel import kernel_image
from edge_server.gpu.stream import Module, Stream
from edge_server.errors import DeviceLost, InternalError

devices = Devices()
device = devices.gpu()
stream = Stream(device)
class Nowhere:
    pointer, nbytes = 0x10000, 1 << 20
try:
    try:
        stream.fill(Nowhere(), 1)
    except InternalError:
        # This driver looks at the address before it takes the work; a kernel's it cannot know.
        module = Module(device, kernel_image(device.compute_capability, device.driver_version))
        layout = FrameLayout.packed(PixelFormat.BGR, 640, 480)
        made = FramePreprocess(layout, 320, 240, scale=1.0).launch([FrameAddress(0x10000)], 0x20000)
        kernel = module.kernel(made.kernel, f"{len(made.args)}s")
        stream.launch(kernel, made.grid, made.block, made.args)
    stream.synchronize()
except DeviceLost as error:
    print("lost:", error)
    try:
        devices.check()
    except DeviceLost:
        print("and known")
"""


def test_a_kernel_that_writes_where_nothing_is_loses_the_device(device: Device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOSE], capture_output=True, text=True, timeout=60, check=False
    )
    lost, known = done.stdout.splitlines() or ("", done.stderr)
    assert lost.startswith("lost: GPU 0: ")
    assert known == "and known"


def test_a_graph_is_recorded_beside_a_thread_that_allocates_and_frees(device: Device) -> None:
    ended = threading.Event()

    def allocate() -> None:
        while not ended.is_set():
            DeviceMemory(device, MIB)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        stream, memory = Stream(device), DeviceMemory(device, MIB)
        back = np.empty(MIB, np.uint8)
        stream.fill(memory, 0)
        for byte in range(50):
            graph = record_graph(stream, lambda byte=byte: stream.fill(memory, byte))
            graph.launch(stream)
            stream.to_host(back, memory)
            stream.synchronize()
            assert (back == byte).all()
            graph.close()
    finally:
        ended.set()
        thread.join()


def test_a_graph_does_again_what_was_recorded(device: Device) -> None:
    stream = Stream(device)
    memory = DeviceMemory(device, MIB)
    back = np.empty(MIB, np.uint8)
    stream.fill(memory, 1)
    graph = record_graph(stream, lambda: stream.fill(memory, 7))
    stream.to_host(back, memory)
    stream.synchronize()
    assert (back == 1).all()
    graph.launch(stream)
    stream.to_host(back, memory)
    stream.synchronize()
    assert (back == 7).all()
