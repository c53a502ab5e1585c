"""What the simulated driver takes for granted holds on the real one."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import Unavailable
from edge_server.gpu.buffer_pool import BufferPool
from edge_server.gpu.device_array import CudaArray
from edge_server.gpu.graph import no_graphs_because, record_graph

if TYPE_CHECKING:
    from edge_server.gpu.device import Device

pytestmark = pytest.mark.hardware

MIB = 1 << 20


def test_bytes_come_back_as_they_went(device: Device) -> None:
    stream = device.stream()
    sent = np.random.default_rng(0).integers(0, 256, 3 * MIB, np.uint8)
    first, second = device.memory(sent.nbytes), device.memory(sent.nbytes)
    stream.to_device(first, sent)
    stream.copy(second, first)
    back = device.pinned(sent.shape, np.uint8)
    stream.to_host(back, second)
    stream.synchronize()
    np.testing.assert_array_equal(back, sent)


def test_a_stream_waits_for_an_event_of_another(device: Device) -> None:
    writer, reader = device.stream(), device.stream()
    large, small = device.memory(256 * MIB), device.memory(4)
    back = device.pinned((4,), np.uint8)
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
    writer, reader = device.stream(), device.stream()
    kept = []
    for byte in range(1, 40):
        array = pool.take(writer, (4 * MIB,), np.uint8)
        writer.fill(array, byte)
        array.written(writer)
        copy = device.memory(array.nbytes)
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
        stream = device.stream()
        for _ in range(20):
            memory = device.memory(MIB)
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
        device.memory(4 * device.total_memory_bytes)
    device.check()


LOSE = """
from edge_server.gpu.devices import Devices
from edge_server.gpu.kernels.preprocess import (
    FrameAddress, FrameLayout, FramePreprocess, PixelFormat
)
from edge_server.gpu.kernels.shipped import kernel_image
from edge_server.errors import DeviceLost, InternalError

devices = Devices()
device = devices.gpu()
stream = device.stream()
class Nowhere:
    pointer, nbytes = 0x10000, 1 << 20
try:
    try:
        stream.fill(Nowhere(), 1)
    except InternalError:
        # This driver looks at the address before it takes the work; a kernel's it cannot know.
        module = device.module(kernel_image(device.compute_capability, device.driver_version))
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


def test_a_graph_does_again_what_was_recorded(device: Device) -> None:
    if reason := no_graphs_because():
        pytest.skip(reason)
    stream = device.stream()
    memory = device.memory(MIB)
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


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_go_to_other_libraries_and_back_in_order(device: Device, library: str) -> None:
    other = pytest.importorskip(library)
    if library == "torch" and not other.cuda.is_available():
        pytest.skip(f"torch {other.__version__} finds no GPU")
    pool = BufferPool(device, 512 * MIB, "test")
    stream = device.stream()
    for byte in range(1, 6):
        array = pool.take(stream, (64 * MIB,), np.uint8)
        stream.fill(array, byte)
        array.written(stream)
        # It waits for the fill by itself, as we do for its sum.
        theirs = other.from_dlpack(array)
        back = CudaArray.of(theirs + 1, stream)
        assert (back.on_host() == byte + 1).all()
