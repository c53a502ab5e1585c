"""States begin as configured and become what the model made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InternalError, ModelConfigError
from edge_server.inference.sequence_book import SequenceStates
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.scheduling import SequenceState
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def states(
    directory: Path,
    shape: tuple[int, ...] = (2,),
    file: str | None = None,
    *,
    datatype: DataType = DataType.FP32,
    max_batch_size: int = 0,
    initial_shape: tuple[int, ...] | None = None,
) -> SequenceStates:
    text = f'name: "m" max_batch_size: {max_batch_size}'
    config = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    state = SequenceState("in", "out", datatype, shape, initial_shape or shape, file)
    return SequenceStates(config, (state,), directory)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], None]:
    def write_content(content: bytes) -> None:
        (tmp_path / "initial_state").mkdir()
        (tmp_path / "initial_state" / "begin").write_bytes(content)

    return write_content


def test_a_state_begins_with_zeros_of_size_one_where_it_is_free(tmp_path: Path) -> None:
    begin = states(tmp_path, (-1, 3), max_batch_size=4, initial_shape=(1, 3)).initial["in"].array
    assert begin.shape == (1, 1, 3)
    assert not begin.any()
    text = states(tmp_path, (2,), datatype=DataType.BYTES).initial["in"].array
    assert text.tolist() == [b"", b""]


def test_the_initial_states_own_size_counts_where_it_is_given(tmp_path: Path) -> None:
    assert states(tmp_path, (-1,), initial_shape=(5,)).initial["in"].shape == (5,)


def test_a_state_begins_with_what_its_file_holds(
    tmp_path: Path, write: Callable[[bytes], None]
) -> None:
    write(np.array([1, 2], "<f4").tobytes())
    assert states(tmp_path, (2,), "begin").initial["in"].array.tolist() == [1, 2]


def test_a_file_of_strings_has_a_length_before_each(
    tmp_path: Path, write: Callable[[bytes], None]
) -> None:
    write(b"\2\0\0\0hi\0\0\0\0")
    made = states(tmp_path, (2,), "begin", datatype=DataType.BYTES)
    assert made.initial["in"].array.tolist() == [b"hi", b""]


@pytest.mark.parametrize(
    ("datatype", "content", "expected"),
    [
        (DataType.FP32, b"1234", "holds 4 bytes, TYPE_FP32 \\[2\\] needs 8"),
        (DataType.BYTES, b"\1\0\0\0a", r"holds 5 bytes, TYPE_STRING \[2\] needs 9"),
        (DataType.BYTES, b"\1\0\0\0a\2\0\0\0b", r"holds 10 bytes, TYPE_STRING \[2\] needs 11"),
        (DataType.BYTES, b"\1\0", r"holds 2 bytes, TYPE_STRING \[2\] needs 5"),
    ],
)
def test_a_file_of_another_size_is_refused_by_name(
    tmp_path: Path,
    write: Callable[[bytes], None],
    datatype: DataType,
    content: bytes,
    expected: str,
) -> None:
    write(content)
    with pytest.raises(ModelConfigError, match=f"begin: {expected}"):
        states(tmp_path, (2,), "begin", datatype=datatype)


def test_an_initial_state_without_its_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="missing: cannot be read"):
        states(tmp_path, (2,), "missing")


def test_the_next_request_gets_what_the_model_made(tmp_path: Path) -> None:
    made = Tensor(np.array([[3, 4]], np.float32))
    after = states(tmp_path, max_batch_size=4).after({"out": made, "y": made})
    assert list(after) == ["in"]
    assert after["in"].array.tolist() == [[3, 4]]


def test_a_state_does_not_keep_the_batch_that_it_was_a_row_of(tmp_path: Path) -> None:
    batch = np.zeros((4, 2), np.float32)
    after = states(tmp_path, max_batch_size=4).after({"out": Tensor(batch[1:2])})
    assert not np.shares_memory(after["in"].array, batch)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, "is missing"),
        ({"out": Tensor(np.zeros(3, np.float32))}, r"is FP32 \[3\], expected FP32 \[2\]"),
        ({"out": Tensor(np.zeros(2, np.int8))}, r"is INT8 \[2\], expected FP32 \[2\]"),
    ],
)
def test_a_state_that_is_no_state_is_an_error_by_name(
    tmp_path: Path, made: dict[str, Tensor], expected: str
) -> None:
    with pytest.raises(InternalError, match=f"state output 'out' {expected}"):
        states(tmp_path).after(made)
