"""Control tensors and states of sequences: what a model gets beside its request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.model_configs import config_of

from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.inference.sequence_book import SequenceControls, SequenceStates
from edge_server.model_config.scheduling import ControlKind, SequenceControl, SequenceState
from edge_server.requests import SequencePlace
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLAGS = (
    SequenceControl("start", ControlKind.START, DataType.INT32, (0, 1)),
    SequenceControl("ready", ControlKind.READY, DataType.FP32, (-1, 1)),
    SequenceControl("end", ControlKind.END, DataType.BOOL, (0, 1)),
)


def controls(*which: SequenceControl, max_batch_size: int = 4) -> SequenceControls:
    text = f'name: "m" max_batch_size: {max_batch_size}'
    return SequenceControls(config_of(text), which)


def corrid(datatype: DataType) -> SequenceControls:
    return controls(SequenceControl("id", ControlKind.CORRID, datatype, None))


@pytest.mark.parametrize(
    "place",
    [
        SequencePlace(1, start=True),
        SequencePlace(1),
        SequencePlace(1, start=True, end=True),
    ],
)
def test_each_flag_is_one_of_its_two_values(place: SequencePlace) -> None:
    tensors = controls(*FLAGS).of(place)
    assert tensors["start"].array.tolist() == [[int(place.start)]]
    assert tensors["ready"].array.tolist() == [[1.0]]
    assert tensors["end"].array.tolist() == [[place.end]]
    assert [tensors[name].datatype.value for name in tensors] == ["INT32", "FP32", "BOOL"]


def test_padding_is_not_ready_and_neither_starts_nor_ends() -> None:
    tensors = controls(*FLAGS).of(None)
    assert [tensors[name].array.item() for name in tensors] == [0, -1.0, False]


def test_the_shape_has_no_batch_dimension_where_the_model_has_none() -> None:
    tensors = controls(*FLAGS, max_batch_size=0).of(SequencePlace(1))
    assert {tensor.shape for tensor in tensors.values()} == {(1,)}


@pytest.mark.parametrize(
    "datatype", [DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32]
)
def test_the_id_comes_in_the_configured_integer(datatype: DataType) -> None:
    made = corrid(datatype)
    largest = int(np.iinfo(datatype.numpy).max)
    assert made.of(SequencePlace(largest))["id"].array.tolist() == [[largest]]
    assert made.of(SequencePlace(largest))["id"].datatype is datatype
    assert made.of(None)["id"].array.tolist() == [[0]]
    with pytest.raises(InvalidRequest, match=f"fits {datatype.value}"):
        made.check(largest + 1)


def test_a_string_id_reaches_a_string_input_whole() -> None:
    made = corrid(DataType.BYTES)
    assert made.of(SequencePlace("a\0"))["id"].array.tolist() == [[b"a\0"]]
    assert made.of(SequencePlace(5))["id"].array.tolist() == [[b"5"]]
    assert made.of(None)["id"].array.tolist() == [[b""]]


def test_a_string_id_for_an_integer_input_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="an integer as correlation ID: its input 'id'"):
        corrid(DataType.UINT64).check("road")


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
    config = config_of(text)
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
