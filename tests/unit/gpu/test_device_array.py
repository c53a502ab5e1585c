"""Arrays on the device: shaped as numpy's, never copied unasked, lent without a copy."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InternalError
from edge_server.gpu.buffer import Buffer
from edge_server.gpu.buffer_pool import BufferPool
from edge_server.gpu.device_array import CudaArray
from edge_server.gpu.dlpack import make_capsule, read_capsule
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream

    from ...conftest import SimulatedGpu


@pytest.fixture
def stream(device: Device) -> Stream:
    return device.stream()


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


class Foreign:
    """Another library's array."""

    def __init__(self, **what: Any) -> None:
        self.__dict__.update(what)


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


def test_a_copy_to_the_host_waits_for_who_writes_it(device: Device, put: Callable) -> None:
    there = put(numbers(8))
    assert np.array_equal(there.on_host(device.stream()), numbers(8))


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


def test_the_cuda_array_interface_names_the_stream_that_writes_it(
    put: Callable, stream: Stream
) -> None:
    there = put(numbers(2, 3))
    assert there.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f4",
        "data": (there.pointer, False),
        "version": 3,
        "strides": None,
        "stream": stream.handle,
    }


def test_an_array_of_another_library_is_seen_without_a_copy_after_its_writer(
    device: Device, stream: Stream
) -> None:
    memory, theirs = device.memory(24), device.stream()
    theirs.to_device(memory, numbers(2, 3))
    seen = CudaArray.of(
        Foreign(
            __cuda_array_interface__={
                "shape": (2, 3),
                "typestr": "<f4",
                "data": (memory.pointer, True),
                "strides": (12, 4),
                "version": 3,
                "stream": theirs.handle,
            }
        ),
        stream,
    )
    assert seen.pointer == memory.pointer
    assert np.array_equal(seen.on_host(), numbers(2, 3))


@pytest.mark.parametrize(
    ("more", "told"),
    [({"strides": (4, 8)}, "not C-contiguous"), ({"mask": object()}, "mask")],
)
def test_a_foreign_array_that_is_no_tensor_is_refused(
    stream: Stream, more: dict[str, Any], told: str
) -> None:
    interface = {"shape": (2, 3), "typestr": "<f4", "data": (512, False), "version": 3, **more}
    with pytest.raises(TypeError, match=told):
        CudaArray.of(Foreign(__cuda_array_interface__=interface), stream)


def test_what_is_no_array_or_lies_elsewhere_is_refused(stream: Stream) -> None:
    with pytest.raises(TypeError, match="list has neither"):
        CudaArray.of([1], stream)
    with pytest.raises(TypeError, match=r"device \(1, 0\), not on GPU 0"):
        CudaArray.of(np.zeros(2), stream)


def test_dlpack_goes_out_and_in_without_a_copy(put: Callable, device: Device) -> None:
    there = put(numbers(2, 3))
    assert there.__dlpack_device__() == (2, 0)
    reader = device.stream()
    back = CudaArray.of(OnlyDlpack(there), reader)
    assert (back.pointer, back.shape, back.dtype) == (there.pointer, (2, 3), np.float32)
    assert np.array_equal(back.on_host(), numbers(2, 3))


def test_who_wants_a_copy_by_dlpack_is_refused(put: Callable) -> None:
    with pytest.raises(BufferError, match="lent, not copied"):
        put(numbers(2)).__dlpack__(copy=True)


class OnlyDlpack:
    """One that knows DLPack only."""

    def __init__(self, array: CudaArray) -> None:
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__


def test_who_takes_it_by_dlpack_waits_for_the_writer_unless_it_says_no(
    put: Callable, device: Device
) -> None:
    taker, back = device.stream(), device.pinned((2,), np.float32)
    for stream, expected in ((taker.handle, [5.0, 6.0]), (-1, [0.0, 0.0])):
        there = put(np.zeros(2, np.float32))
        there.ready.wait()
        writer = device.stream()
        writer.to_device(there, np.array([5, 6], np.float32))
        there.written(writer)
        capsule = there.__dlpack__(stream=stream, max_version=(1, 0))
        taker.to_host(back, there)
        taker.synchronize()
        assert back.tolist() == expected
        del capsule


def test_a_library_whose_interface_names_no_stream_is_asked_by_dlpack(
    put: Callable, device: Device
) -> None:
    there = put(np.zeros(2, np.float32))
    there.ready.wait()
    writer, taker = device.stream(), device.stream()
    writer.to_device(there, np.array([5, 6], np.float32))
    there.written(writer)
    theirs = OnlyDlpack(there)
    theirs.__cuda_array_interface__ = {**there.__cuda_array_interface__, "version": 2}
    del theirs.__cuda_array_interface__["stream"]
    assert CudaArray.of(theirs, taker).on_host().tolist() == [5.0, 6.0]


def test_onnxruntime_takes_it_where_it_lies_and_gives_it_back(
    put: Callable, stream: Stream, device: Device
) -> None:
    value_type = pytest.importorskip("onnxruntime").capi.onnxruntime_pybind11_state.OrtValue
    there = put(numbers(2, 3))
    pointer = there.pointer
    value = value_type.from_dlpack(there.__dlpack__(), False)
    assert (value.device_name(), value.data_ptr(), value.shape()) == ("Cuda", pointer, [2, 3])
    back = CudaArray.of(value, stream)
    assert back.pointer == pointer
    assert np.array_equal(back.on_host(), numbers(2, 3))
    # The memory is theirs for as long as they hold it.
    del there
    gc.collect()
    assert put(numbers(2, 3)).pointer != pointer
    del value, back
    gc.collect()
    held = [put(numbers(2, 3)), put(numbers(2, 3))]
    assert pointer in [array.pointer for array in held]


class Lent:
    """Host memory in our capsules, so that numpy can read them."""

    def __init__(self, array: np.ndarray, shape: tuple[int, ...]) -> None:
        self.array, self.shape = array, shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: object) -> object:
        dtype = self.array.dtype
        return make_capsule(self, self.array.ctypes.data, self.shape, dtype, (1, 0))


KINDS = ["?", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8"]


@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)
def test_numpy_reads_our_capsules_and_we_read_numpys(kind: str, shape: tuple[int, ...]) -> None:
    array = np.frombuffer(bytes(i % 2 for i in range(8 * 4**4)), kind)
    array = array[: np.prod(shape, dtype=int)].reshape(shape).copy()
    seen = np.from_dlpack(Lent(array, shape))
    assert (seen.shape, seen.dtype) == (array.shape, array.dtype)
    assert np.array_equal(seen, array)
    assert not array.size or np.shares_memory(seen, array)

    pointer, read_shape, dtype = read_capsule(array.__dlpack__())
    assert (read_shape, dtype) == (shape, array.dtype)
    assert not array.size or pointer == array.ctypes.data


def test_a_capsule_keeps_its_memory_until_its_taker_is_through() -> None:
    gone: list[str] = []

    class Memory(Lent):
        def __del__(self) -> None:
            gone.append("gone")

    array = np.ones(3)
    untaken = Memory(array, (3,)).__dlpack__()
    gc.collect()
    assert gone == []
    del untaken
    assert gone == ["gone"]
    taken = np.from_dlpack(Memory(array, (3,)))
    gc.collect()
    assert gone == ["gone"]
    assert taken.tolist() == [1.0] * 3
    del taken
    assert gone == ["gone"] * 2


def test_a_capsule_that_was_taken_or_is_not_contiguous_is_refused() -> None:
    array = numbers(4, 4)
    capsule = Lent(array, (4, 4)).__dlpack__()
    with pytest.raises(TypeError, match="not C-contiguous"):
        read_capsule(array.T.__dlpack__())
    assert read_capsule(capsule)[1] == (4, 4)
    value_type = pytest.importorskip("onnxruntime").capi.onnxruntime_pybind11_state.OrtValue
    value_type.from_dlpack(capsule, False)
    with pytest.raises(TypeError, match="taken already"):
        read_capsule(capsule)


def test_bfloat16_has_its_own_type_in_dlpack(device: Device, stream: Stream) -> None:
    bfloat16 = DataType.BF16.numpy
    buffer = Buffer(device, 512, 8, None)
    buffer.written(stream)
    capsule = CudaArray(buffer, (4,), bfloat16).__dlpack__()
    assert read_capsule(capsule) == (512, (4,), bfloat16)
    with pytest.raises(BufferError, match="no type for numpy object"):
        CudaArray(buffer, (1,), np.dtype(object)).__dlpack__()
