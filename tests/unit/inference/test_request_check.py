"""A request is held against the model's configuration before it costs anything."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from support.model_configs import config_of
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest
from edge_server.inference.request_check import check_request
from edge_server.model_config.config import ModelConfig
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

BATCHING = config_of(
    'name: "m" backend: "identity" max_batch_size: 2 '
    'input { name: "a" data_type: TYPE_FP32 dims: [-1, 3] } '
    'input { name: "b" data_type: TYPE_INT32 dims: 2 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 1 } '
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
def test_each_mismatch_is_reported_in_tritons_words(
    arrays: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**arrays)
    assert says in str(caught.value)


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unexpected inference output 'z' for model 'm'"):
        check(a=A, b=B, outputs=("z",))


OPTIONAL = config_of(
    'name: "m" backend: "identity" '
    'input { name: "a" data_type: TYPE_FP32 dims: [-1, 3] } '
    'input { name: "b" data_type: TYPE_INT32 dims: 2 } '
    'input { name: "c" data_type: TYPE_INT32 dims: 2 optional: true } '
)
A_ALONE = np.zeros((5, 3), np.float32)
B_ALONE = np.zeros(2, np.int32)


def check_optional(**arrays: np.ndarray) -> None:
    tensors = {name: Tensor(array) for name, array in arrays.items()}
    check_request(OPTIONAL, InferRequest("m", tensors, id="7"))


def test_an_optional_input_may_be_there_or_not() -> None:
    check_optional(a=A_ALONE, b=B_ALONE)
    check_optional(a=A_ALONE, b=B_ALONE, c=B_ALONE)


def test_a_free_size_may_be_zero() -> None:
    check_optional(a=A_ALONE[:0], b=B_ALONE)


def test_a_model_that_batches_may_have_optional_inputs_alone() -> None:
    message = text_format.Parse(
        'name: "m" max_batch_size: 2 '
        'input { name: "a" data_type: TYPE_FP32 dims: 1 optional: true }',
        pb.ModelConfig(),
    )
    check_request(ModelConfig.of(message), InferRequest("m", {}))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (
            {"a": A_ALONE},
            "[request id: 7] expected number of inputs between 2 and 3 but got 1 inputs for model "
            "'m'. Got input(s) ['a'], but missing required input(s) ['b']. Please provide all "
            "required input(s).",
        ),
        (
            {},
            "[request id: 7] expected number of inputs between 2 and 3 but got 0 inputs for model "
            "'m'. Got input(s) [], but missing required input(s) ['a','b']. Please provide all "
            "required input(s).",
        ),
        (
            {"a": A_ALONE, "c": B_ALONE},
            "[request id: 7] expected number of inputs between 2 and 3 but got 2 inputs for model "
            "'m'. Got input(s) ['a','c'], but missing required input(s) ['b']. Please provide all "
            "required input(s).",
        ),
        ({"a": A_ALONE, "d": B_ALONE}, "unexpected inference input 'd' for model 'm'"),
        (
            {"a": A_ALONE, "b": B_ALONE, "c": B_ALONE.astype(np.int64)},
            "[request id: 7] inference input 'c' data-type is 'INT64', but model 'm' expects "
            "'INT32'",
        ),
    ],
)
def test_a_required_input_is_missed_whatever_optional_ones_are_there(
    arrays: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_optional(**arrays)
    assert str(caught.value) == says


def test_the_shape_of_a_model_that_does_not_batch_is_reported_without_the_note() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_optional(a=A_ALONE[0], b=B_ALONE)
    assert str(caught.value) == (
        "[request id: 7] unexpected shape for input 'a' for model 'm'. Expected [-1,3], got [3]. "
    )
