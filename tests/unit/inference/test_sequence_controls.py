"""Control inputs hold the place of a request, in the type and shape that the model takes."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest
from edge_server.inference.sequence_book import SequenceControls
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.scheduling import ControlKind, SequenceControl
from edge_server.requests import SequencePlace
from edge_server.tensors import DataType

FLAGS = (
    SequenceControl("start", ControlKind.START, DataType.INT32, (0, 1)),
    SequenceControl("ready", ControlKind.READY, DataType.FP32, (-1, 1)),
    SequenceControl("end", ControlKind.END, DataType.BOOL, (0, 1)),
)


def controls(*which: SequenceControl, max_batch_size: int = 4) -> SequenceControls:
    text = f'name: "m" max_batch_size: {max_batch_size}'
    return SequenceControls(ModelConfig.of(text_format.Parse(text, pb.ModelConfig())), which)


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
