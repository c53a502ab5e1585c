"""`identity` hands its inputs on and takes no parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import identity
from edge_server.errors import ModelConfigError
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles

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
        (IO % 4 + 'parameters { key: "scale" }', "unknown field `scale`.*'identity' knows: none"),
    ],
)
def test_other_tensors_or_parameters_are_refused(text: str, says: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^m/config.pbtxt: .*{says}"):
        completed(text)
