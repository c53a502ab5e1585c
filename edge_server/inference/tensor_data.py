"""Tensors that no request carries: zeros, random data, and data of a model's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.tensors import DataType, element_count

if TYPE_CHECKING:
    from numpy.typing import NDArray


def zeros(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros of any type; texts are empty."""
    if datatype is DataType.BYTES:
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, datatype.numpy)


def random_data(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Any integer, floats in [0, 1), texts of 8 digits; the same each time."""
    generator = np.random.default_rng(0)
    dtype = datatype.numpy
    if datatype is DataType.BYTES:
        texts = [b"%08d" % n for n in generator.integers(0, 10**8, element_count(shape))]
        return np.array(texts, np.object_).reshape(shape)
    if datatype is DataType.BF16:
        # The upper half of a float32 is a bfloat16.
        bits = generator.random(shape, np.float32).view(np.uint32) >> 16
        return bits.astype("<u2").view(dtype)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def first_tensor(
    raw: bytes, datatype: DataType, shape: tuple[int, ...]
) -> tuple[NDArray[Any] | None, int]:
    """The tensor that `raw` begins with, None where `raw` is too short, and its size in bytes.

    Args:
        raw: little-endian elements in C order; of BYTES, each behind its length in 4 bytes.
    """
    count = element_count(shape)
    if datatype is not DataType.BYTES:
        n_bytes = count * datatype.numpy.itemsize
        if len(raw) < n_bytes:
            return None, n_bytes
        return np.frombuffer(raw, datatype.numpy, count).reshape(shape), n_bytes
    texts: list[bytes] = []
    at = 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if len(raw) < max(end, at + 4):
            return None, max(end, at + 4)
        texts.append(raw[at + 4 : end])
        at = end
    return np.array(texts, np.object_).reshape(shape), at
