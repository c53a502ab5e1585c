"""`pb_utils.Tensor`: numpy, DLPack, and the texts."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from edge_server.backends.python import pb_utils
from edge_server.backends.python.pb_utils.tensor import DATA_TYPES
from edge_server.backends.python.pb_utils.tensor import PbTensor as Tensor
from edge_server.tensors import DataType


def test_the_array_is_the_models_own() -> None:
    array = np.arange(4, dtype=np.float32)
    tensor = Tensor("x", array)
    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("x", [4], 11)
    assert tensor.is_cpu()


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("", np.zeros(1), "Tensor name cannot be an empty string."),
        ("x", np.array(["a"]), "NumPy dtype is not supported."),
        ("x", np.zeros(1, np.complex64), "NumPy dtype is not supported."),
    ],
)
def test_what_is_no_tensor_is_refused(name: str, array: np.ndarray, text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException) as raised:
        Tensor(name, array)
    assert str(raised.value) == text


def test_big_endian_arrays_travel_as_little_endian() -> None:
    assert Tensor("x", np.array([1], ">i4")).as_numpy().dtype == np.dtype("<i4")


def test_fixed_width_bytes_are_bytes() -> None:
    assert Tensor("x", np.array([b"ab"])).triton_dtype() == 13


class Exports:
    """What torch and others look like: an object that exports a DLPack capsule."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **_: object) -> object:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_dlpack_shares_the_memory_both_ways() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = Tensor.from_dlpack("x", Exports(array))
    assert np.shares_memory(tensor.as_numpy(), array)
    again = np.from_dlpack(tensor)
    assert np.shares_memory(again, array)
    assert np.array_equal(Tensor.from_dlpack("y", array.__dlpack__()).as_numpy(), array)


def test_bf16_travels_through_dlpack_only() -> None:
    bits = np.array([[0x3F80, 0x4000], [0x4040, 0x4080]], np.uint16)
    tensor = Tensor.over("x", DataType.BF16, bits.view(DataType.BF16.numpy))
    with pytest.raises(pb_utils.TritonModelException) as raised:
        tensor.as_numpy()
    assert str(raised.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
        "instead."
    )
    again = Tensor.from_dlpack("y", tensor.to_dlpack())
    datatype, array = again.content
    assert datatype is DataType.BF16
    assert array.view(np.uint16).tolist() == bits.tolist()
    assert np.shares_memory(array, bits)


@pytest.mark.parametrize("used", [False, True])
def test_a_bf16_capsule_lets_its_memory_go(used: bool) -> None:
    array = np.zeros(2, np.uint16)
    alive = weakref.ref(array)
    capsule = Tensor.over("x", DataType.BF16, array.view(DataType.BF16.numpy)).to_dlpack()
    again = Tensor.from_dlpack("y", capsule) if used else None
    del array, capsule
    gc.collect()
    assert (alive() is not None) == used
    del again
    gc.collect()
    assert alive() is None


def test_a_capsule_is_used_once() -> None:
    capsule = Tensor.over("x", DataType.BF16, np.zeros(2, DataType.BF16.numpy)).to_dlpack()
    Tensor.from_dlpack("y", capsule)
    with pytest.raises(TypeError, match="no DLPack capsule that is still unused"):
        Tensor.from_dlpack("z", capsule)


def test_strings_have_no_dlpack() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^DLPack does not have support for"):
        Tensor("x", np.array([b"a"], np.object_)).to_dlpack()


def test_a_tensor_of_a_gpu_is_refused() -> None:
    class OnGpu(Exports):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(pb_utils.TritonModelException, match="not in host memory"):
        Tensor.from_dlpack("x", OnGpu(np.zeros(1)))


def test_types_have_the_numbers_of_the_protocols_own_enumeration() -> None:
    from tritonclient.grpc import model_config_pb2 as pb

    for number, datatype in enumerate(DATA_TYPES, 1):
        assert pb.DataType.Value(datatype.config_name) == number


def test_the_type_functions_agree() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb_utils.triton_to_numpy_type(13) is np.object_
    assert pb_utils.numpy_to_triton_type(np.float16) == 10
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13


def test_byte_tensors_are_read_as_they_are_written() -> None:
    array = np.array([[b"a", "ö"], [b"", b"xyz"]], np.object_)
    written = pb_utils.serialize_byte_tensor(array)
    assert isinstance(written, bytes)
    read = pb_utils.deserialize_bytes_tensor(written)
    assert read.tolist() == [b"a", "ö".encode(), b"", b"xyz"]
