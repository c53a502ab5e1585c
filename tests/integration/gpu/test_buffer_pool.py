"""Device memory goes round in the order of streams, and never under a reader's feet."""

from __future__ import annotations

import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_server.errors import Unavailable
from edge_server.gpu.memory import Buffer, BufferPool, pinned_array
from edge_server.gpu.stream import GpuEvent, Stream

if TYPE_CHECKING:
    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device
    from edge_server.gpu.memory import CudaArray


@pytest.fixture
def pool(device: Device) -> BufferPool:
    return BufferPool(device, 1 << 20, "lane_preprocess_0")


def test_nothing_is_allocated_once_every_size_has_been_seen(
    device: Device, pool: BufferPool, simulated_gpu: SimulatedGpu
) -> None:
    stream = Stream(device)

    def frame(rows: int) -> None:
        array = pool.take(stream, (rows, 640), np.float16)
        stream.fill(array, rows)
        array.written(stream)

    for rows in (1, 4, 7):
        frame(rows)
    warm = simulated_gpu.allocations
    for rows in (1, 4, 7, 3, 6) * 3:
        frame(rows)
    assert simulated_gpu.allocations == warm


def test_memory_stays_with_its_views_and_comes_back_with_the_last(
    device: Device, pool: BufferPool
) -> None:
    stream = Stream(device)
    array = pool.take(stream, (4, 256), np.uint8)
    pointer, view = array.pointer, array[1:2].reshape((-1,))
    del array
    other = pool.take(stream, (4, 256), np.uint8)
    assert other.pointer != pointer
    del view
    assert pool.take(stream, (4, 256), np.uint8).pointer == pointer


def test_an_array_may_be_dropped_on_any_thread(device: Device, pool: BufferPool) -> None:
    stream = Stream(device)
    held = [pool.take(stream, (8,), np.uint8)]
    pointer = held[0].pointer
    worker = threading.Thread(target=held.clear)
    worker.start()
    worker.join()
    assert pool.take(stream, (8,), np.uint8).pointer == pointer


def test_a_pool_says_who_wants_more_than_its_limit(device: Device) -> None:
    pool = BufferPool(device, 1536, "lane_preprocess_0")
    stream = Stream(device)
    held = pool.take(stream, (1500,), np.uint8)
    with pytest.raises(
        Unavailable,
        match=r"^GPU 0: lane_preprocess_0: 512 bytes are wanted, 1536 of at most 1536 are in use$",
    ):
        pool.take(stream, (1,), np.uint8)
    del held
    # What is idle, but too large to be lent for so little, makes room.
    assert pool.take(stream, (1,), np.uint8).nbytes == 1
    assert pool.held_bytes == 512


def test_a_closed_pool_frees_what_is_idle_at_once_and_the_rest_with_its_arrays(
    device: Device, simulated_gpu: SimulatedGpu
) -> None:
    pool = BufferPool(device, 1 << 20, "test")
    stream = Stream(device)
    idle, used = (pool.take(stream, (512,), np.uint8) for _ in range(2))
    del idle
    pool.close()
    gc.collect()
    assert simulated_gpu.comes_to(512)
    del used
    gc.collect()
    assert simulated_gpu.comes_to(0)


def test_threads_share_a_pool_and_hand_arrays_on(device: Device, pool: BufferPool) -> None:
    arrays: queue.Queue[CudaArray | None] = queue.Queue(maxsize=4)
    frames, seen = 100, []

    def write(first: int) -> None:
        stream = Stream(device)
        for value in range(first, first + frames):
            array = pool.take(stream, (64,), np.uint8)
            stream.fill(array, value)
            array.written(stream)
            arrays.put(array)
        arrays.put(None)

    def read() -> None:
        stream, done, copy = Stream(device), GpuEvent(device), pinned_array(device, (64,), np.uint8)
        while (array := arrays.get()) is not None:
            stream.wait(array.ready)
            stream.to_host(copy, array)
            array.read_by(done.record(stream))
            stream.synchronize()
            assert len(set(copy.tolist())) == 1
            seen.append(int(copy[0]))

    work = [(write, 0), (write, frames), (read,), (read,)]
    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(*call) for call in work]:
            done.result(timeout=60)
    assert sorted(seen) == list(range(2 * frames))
    assert pool.held_bytes <= 10 * 512


# What a day may bring, step by step: a frame is written by stream A, it is read by B, C or the
# host, somebody lets go of it, and the device gets on with some work.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2)),
        st.tuples(st.just("read"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("work"), st.integers(0, 2)),
    ),
    max_size=40,
)


class Day:
    """A pool among three streams; every reader compares what it gets with what was written."""

    def __init__(self, device: Device, pool: BufferPool) -> None:
        self.pool = pool
        self.streams = [Stream(device) for _ in range(3)]
        self.alive: list[tuple[int, CudaArray]] = []
        self.read: list[tuple[int, np.ndarray]] = []
        self.device = device
        self.written = 0

    def write(self, stream: int) -> None:
        self.written += 1
        array = self.pool.take(self.streams[stream], (16,), np.uint8)
        self.streams[stream].fill(array, self.written)
        array.written(self.streams[stream])
        self.alive.append((self.written, array))

    def reads(self, stream: int, which: int) -> None:
        if which < len(self.alive):
            value, array = self.alive[which]
            copy = pinned_array(self.device, (16,), np.uint8)
            self.streams[stream].wait(array.ready)
            self.streams[stream].to_host(copy, array)
            array.read_by(self.streams[stream].record())
            self.read.append((value, copy))

    def run(self, steps: list[tuple[str, int, int]]) -> None:
        for what, *numbers in steps:
            if what == "write":
                self.write(numbers[0])
            elif what == "read":
                self.reads(*numbers)
            elif what == "drop":
                del self.alive[numbers[0] : numbers[0] + 1]
            else:
                self.streams[numbers[0]].record().reached()
        self.device.check()
        for value, copy in self.read:
            assert set(copy.tolist()) == {value}


# One device for all examples: each has a pool of its own, and waits for all work at its end.
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_reader_sees_what_was_written_for_it(
    device: Device, steps: list[tuple[str, int, int]]
) -> None:
    Day(device, BufferPool(device, 1 << 20, "test")).run(steps)


WRITE_READ_REUSE: list[tuple[str, int, int]] = [
    ("write", 0),
    ("read", 1, 0),
    ("drop", 0),
    ("write", 0),
    ("work", 0),
    ("work", 0),
    ("work", 0),
]


def test_the_simulation_catches_a_pool_that_does_not_wait_for_readers(
    device: Device, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Day(device, pool).run(WRITE_READ_REUSE)

    def careless(self: Buffer, stream: Stream) -> None:
        self._readers.clear()

    monkeypatch.setattr(Buffer, "reuse", careless)
    # Memory of an earlier test that the collector frees in between waits for all work, as on a
    # GPU, so the reader comes in time; on a busy machine it may by itself.
    gc.collect()
    gc.disable()

    def run_careless_days() -> None:
        for _ in range(100):
            Day(device, BufferPool(device, 1 << 20, "careless")).run(WRITE_READ_REUSE)

    try:
        with pytest.raises(AssertionError):
            run_careless_days()
    finally:
        gc.enable()


def test_memory_that_comes_back_from_a_reference_cycle_can_be_used_again(
    device: Device, pool: BufferPool
) -> None:
    stream = Stream(device)
    array = pool.take(stream, (4, 256), np.uint8)
    pointer = array.pointer
    # As the traceback of an error keeps what a request held.
    cycle: list[object] = [array]
    cycle.append(cycle)
    del array, cycle
    gc.collect()
    again = pool.take(stream, (4, 256), np.uint8)
    assert again.pointer == pointer
    stream.fill(again, 7)
    again.written(stream)
    np.testing.assert_array_equal(again.on_host(), 7)
