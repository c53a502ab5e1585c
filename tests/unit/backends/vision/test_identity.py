"""`identity` hands its inputs on and takes no parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import ExecuteRequest, LoadContext
from edge_server.backends.vision import identity
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.gpu.device import Devices
from edge_server.inference.registry import Snapshot
from edge_server.model_config.config import ON_CPU, ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.requests import InferRequest
from edge_server.tensors import DataType, Tensor

IO = (
    'input { name: "a" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "b" data_type: TYPE_FP32 dims: %d } '
)


def completed(text: str) -> ModelConfig:
    message = text_format.Parse('name: "m" backend: "identity" ' + text, pb.ModelConfig())
    return identity.complete(ModelFiles("m", Path("m"), {}), 1, ModelConfig.of(message))


def test_inputs_and_outputs_that_pair_up_are_taken_as_they_are() -> None:
    assert completed(IO % 4).outputs[0].shape == (4,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (IO % 5, "one output for each input"),
        (
            IO % 4 + 'sequence_batching { state { input_name: "i" output_name: "o" '
            "data_type: TYPE_FP32 dims: 1 } }",
            "gives no states; remove 'state'",
        ),
        (IO % 4 + 'parameters { key: "scale" }', "unknown field `scale`.*'identity' knows: none"),
    ],
)
def test_other_tensors_or_parameters_are_refused(text: str, says: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^m/config.pbtxt: .*{says}"):
        completed(text)


def test_dims_may_differ_where_a_reshape_makes_the_models_own_shapes_equal() -> None:
    reshaped = IO.replace("dims: 4", "dims: 4 reshape { shape: [2, 2] }").replace("%d", "[2, 2]")
    assert completed(reshaped).outputs[0].shape == (2, 2)


def answer(config: ModelConfig, outputs: set[str], **arrays: np.ndarray) -> object:
    answers: list[object] = []
    inputs = {name: Tensor(array) for name, array in arrays.items()}
    request = ExecuteRequest(
        inputs,
        frozenset(outputs),
        lambda a, _final, _parameters=None: answers.append(a),
        InferRequest("m", inputs),
        Snapshot({}),
    )
    model = identity.load(LoadContext(Path("m"), config, Devices()))
    model.make_instance("m_0", ON_CPU).execute([request])
    return answers[0]


def test_any_type_is_handed_on_as_it_is() -> None:
    config = completed((IO % 4).replace("FP32", "BF16"))
    array = np.zeros(4, DataType.BF16.numpy)
    assert answer(config, {"b"}, a=array)["b"].array is array


def test_an_output_whose_optional_input_was_left_out_cannot_be_given() -> None:
    second = (IO % 4).replace('"a"', '"c"').replace('"b"', '"d"')
    config = completed(IO % 4 + second.replace("dims: 4 }", "dims: 4 optional: true }", 1))
    array = np.zeros(4, np.float32)
    assert answer(config, {"b"}, a=array)["b"].array is array
    refused = answer(config, {"b", "d"}, a=array)
    assert isinstance(refused, InvalidRequest)
    assert "output 'd' of model 'm' is its input 'c', which was left out" in str(refused)
