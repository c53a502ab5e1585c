"""Arrays on the device: shaped as numpy's, never copied unasked, lent without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_server.errors import InternalError
from edge_server.gpu.memory import BufferPool
from edge_server.gpu.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device
    from edge_server.gpu.memory import CudaArray


@pytest.fixture
def stream(device: Device) -> Stream:
    return Stream(device)


@pytest.fixture
def put(device: Device, stream: Stream) -> Callable[[np.ndarray], CudaArray]:
    """Brings a host array onto the device."""
    pool = BufferPool(device, 1 << 20, "test")

    def put(array: np.ndarray) -> CudaArray:
        there = pool.take(stream, array.shape, array.dtype)
        stream.to_device(there, array)
        there.written(stream)
        return there

    return put


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_it_tells_what_numpy_would_tell(put: Callable) -> None:
    host = np.zeros((2, 3, 4), np.float16)
    there = put(host)
    for what in ("shape", "dtype", "size", "ndim", "nbytes"):
        assert getattr(there, what) == getattr(host, what)
    assert len(there) == 2
    assert repr(there) == "CudaArray([2, 3, 4], float16, on GPU 0)"


def test_shapes_and_rows_are_views_of_the_same_memory(put: Callable) -> None:
    host = numbers(4, 6)
    there = put(host)
    assert np.array_equal(there[1:3].on_host(), host[1:3])
    assert np.array_equal(there[-1:].reshape((2, 3)).on_host(), host[-1:].reshape(2, 3))
    assert np.array_equal(there.reshape((3, -1))[1:].on_host(), host.reshape(3, -1)[1:])
    assert there[4:].shape == (0, 6)
    assert there[:].pointer == there.pointer


def test_a_shape_of_another_size_is_refused_as_numpy_does(put: Callable) -> None:
    with pytest.raises(ValueError, match="cannot reshape"):
        put(numbers(4, 6)).reshape((5, 5))


@pytest.mark.parametrize("key", [1, (slice(1), slice(1)), slice(0, 4, 2), None, ...])
def test_only_rows_that_follow_one_another_are_taken(put: Callable, key: Any) -> None:
    with pytest.raises(TypeError, match=r"rows \[a:b\]"):
        put(numbers(4, 6))[key]


def test_it_becomes_no_host_array_unasked(put: Callable) -> None:
    there = put(numbers(2))
    with pytest.raises(TypeError, match=r"on_host\(\) copies it"):
        np.asarray(there)
    with pytest.raises(TypeError, match=r"on_host\(\) copies it"):
        np.concatenate([there, there])


def test_a_copy_to_the_host_waits_for_who_writes_it(put: Callable) -> None:
    there = put(numbers(8))
    assert np.array_equal(there.on_host(), numbers(8))


def test_who_copies_to_the_host_sleeps_until_it_is_written(
    put: Callable, simulated_gpu: SimulatedGpu
) -> None:
    there = put(numbers(8))
    # A copy to pageable memory waits too, but awake: it comes second.
    simulated_gpu.set("fail=cuEventSynchronize:1:0")
    with pytest.raises(InternalError, match="wait for an event"):
        there.on_host()


def test_what_nobody_wrote_cannot_be_read(device: Device, stream: Stream) -> None:
    there = BufferPool(device, 4096, "test").take(stream, (2, 2), np.float32)
    with pytest.raises(InternalError, match="nothing was written to"):
        there.on_host()
