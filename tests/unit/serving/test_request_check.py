"""A request is held against the model's configuration before it costs anything."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest
from edge_server.model_config.config import ModelConfig
from edge_server.requests import InferRequest
from edge_server.serving.request_check import check_request
from edge_server.tensors import Tensor

BATCHING = ModelConfig.of(
    text_format.Parse(
        'name: "m" backend: "identity" max_batch_size: 2 '
        'input { name: "a" data_type: TYPE_FP32 dims: [-1, 3] } '
        'input { name: "b" data_type: TYPE_INT32 dims: 2 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 } ',
        pb.ModelConfig(),
    )
)
A = np.zeros((1, 5, 3), np.float32)
B = np.zeros((1, 2), np.int32)


def check(outputs: tuple[str, ...] = (), **arrays: np.ndarray) -> None:
    tensors = {name: Tensor(array) for name, array in arrays.items()}
    check_request(BATCHING, InferRequest("m", tensors, outputs=outputs, id="7"))


def test_a_fitting_request_passes() -> None:
    check(a=A, b=B, outputs=("y",))
    check(a=A.repeat(2, 0), b=B.repeat(2, 0))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (
            {"a": A},
            "[request id: 7] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) "
            "['a'], but missing required input(s) ['b']. Please provide all required input(s).",
        ),
        ({"a": A, "c": B}, "unexpected inference input 'c' for model 'm'"),
        (
            {"a": A.astype(np.float64), "b": B},
            "inference input 'a' data-type is 'FP64', but model 'm' expects 'FP32'",
        ),
        (
            {"a": A[0], "b": B},
            "unexpected shape for input 'a' for model 'm'. Expected [-1,-1,3], got [5,3]. NOTE: "
            "Setting a non-zero max_batch_size in the model config requires a batch dimension",
        ),
        (
            {"a": A.repeat(2, 0), "b": B},
            "input 'b' batch size does not match other inputs for 'm'",
        ),
        ({"a": A[:0], "b": B[:0]}, "inference request batch-size must be >= 1 and <= 2 for 'm'"),
        (
            {"a": A.repeat(3, 0), "b": B.repeat(3, 0)},
            "inference request batch-size must be <= 2 for 'm'",
        ),
        (
            {"a": np.float32(1).reshape(()), "b": B},
            "input 'a' has no shape but model requires batch dimension for 'm'",
        ),
    ],
)
def test_each_mismatch_is_told_in_the_contracts_words(
    arrays: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**arrays)
    assert says in str(caught.value)


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unexpected inference output 'z' for model 'm'"):
        check(a=A, b=B, outputs=("z",))
