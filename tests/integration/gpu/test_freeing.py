"""Memory is freed without a thread waiting that has something else to do.

The simulated driver frees, as the real one, once the GPU is idle; here it is busy until somebody in
Python has seen that and says so, or gives up by itself.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import Unavailable
from edge_server.gpu.device import Device
from edge_server.gpu.memory import BufferPool, DeviceMemory, pinned_array
from edge_server.gpu.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.simulated_gpu import SimulatedGpu

LONG_MS = 30_000


def drop_memory(device: Device) -> None:
    DeviceMemory(device, 512)


def drop_pinned(device: Device) -> None:
    pinned_array(device, (512,), np.uint8)


def make_room_in_a_pool(device: Device) -> None:
    pool = BufferPool(device, 2048, "test")
    stream = Stream(device)
    pool.take(stream, (2048,), np.uint8)
    pool.take(stream, (1,), np.uint8)


@pytest.mark.parametrize("drop", [drop_memory, drop_pinned, make_room_in_a_pool])
def test_who_drops_memory_goes_on_while_the_gpu_is_busy(
    device: Device, simulated_gpu: SimulatedGpu, drop: Callable[[Device], None]
) -> None:
    simulated_gpu.keep_busy(LONG_MS)
    drop(device)
    ends = threading.Timer(LONG_MS / 1e3, lambda: None)
    ends.start()
    # Had this thread waited, nobody would wait any more.
    assert simulated_gpu.let_go_on(ends.is_alive)
    ends.cancel()
    assert simulated_gpu.comes_to(0)


def test_other_threads_go_on_while_memory_is_freed(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    def drop() -> None:
        simulated_gpu.keep_busy(LONG_MS)
        DeviceMemory(device, 512)
        device.finish_freeing()

    dropping = threading.Thread(target=drop)
    dropping.start()
    assert simulated_gpu.let_go_on(dropping.is_alive)
    dropping.join()


def test_memory_that_is_short_is_waited_for_where_some_is_garbage(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    simulated_gpu.set("memory=1000")
    for _ in range(20):
        # What the last round dropped may not be free yet.
        DeviceMemory(device, 1000)
    held = DeviceMemory(device, 1000)
    with pytest.raises(Unavailable, match="out of memory"):
        DeviceMemory(device, 1)
    del held
    DeviceMemory(device, 1)


def test_a_device_that_is_closed_has_freed_what_was_dropped(simulated_gpu: SimulatedGpu) -> None:
    device = Device()
    for _ in range(50):
        DeviceMemory(device, 512)
        pinned_array(device, (512,), np.uint8)
    device.close()
    assert simulated_gpu.device_bytes == 0
    assert not device._freeing.is_alive()
