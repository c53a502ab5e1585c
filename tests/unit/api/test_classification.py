"""Classes come best first, as text, and never more than there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.api.convert import TopClasses
from edge_server.errors import InvalidRequest
from edge_server.tensors import DataType, Tensor


def classes(array: np.ndarray, count: int, *, batched: bool, labels: tuple[str, ...] = ()) -> Any:
    return TopClasses(count, batched, labels).of(Tensor(array)).array.tolist()


def test_of_equal_scores_the_first_place_comes_first() -> None:
    scores = np.array([1, 3, 3, 2], np.uint8)
    assert classes(scores, 3, batched=False) == [b"3.000000:1", b"3.000000:2", b"2.000000:3"]


def test_a_place_without_a_label_is_returned_without() -> None:
    scores = np.array([[0.5, 0.25, 0.125]])
    assert classes(scores, 9, batched=True, labels=("a", "")) == [
        [b"0.500000:0:a", b"0.250000:1", b"0.125000:2"]
    ]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)])
def test_nothing_has_no_classes(shape: tuple[int, ...]) -> None:
    made = TopClasses(2, batched=True).of(Tensor(np.zeros(shape, np.float32)))
    assert made.array.size == 0
    assert made.array.shape[0] == shape[0]


def test_types_without_an_order_are_refused() -> None:
    for datatype in (DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES):
        with pytest.raises(InvalidRequest, match=f"unsupported type '{datatype.value}'"):
            TopClasses(1, batched=False).of(Tensor(np.zeros(2, datatype.numpy)))


def test_more_classes_than_a_client_can_mean_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="classification output tensor too large"):
        TopClasses(2**40, batched=False).of(Tensor(np.zeros(10**6, np.float32)))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.integers(1, 25))
def test_the_order_is_that_of_the_values(values: list[int], count: int) -> None:
    made = classes(np.array(values, np.uint64), count, batched=False)
    places = [int(text.split(b":")[1]) for text in made]
    assert places == sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
