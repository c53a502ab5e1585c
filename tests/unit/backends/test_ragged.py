"""Requests of different shapes run as one batch, and each gets back what is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.onnxruntime import RaggedInstance
from edge_server.errors import EdgeServerError, InternalError
from edge_server.inference.registry import Snapshot
from edge_server.model_config.config import ModelConfig
from edge_server.requests import NO_PARAMETERS, InferRequest, Parameters
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Run, Tensors

IO = """
max_batch_size: 8
input { name: "r" data_type: TYPE_FP32 dims: [-1, 2] allow_ragged_batch: true }
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
output { name: "s" data_type: TYPE_FP32 dims: [-1, 2] }
"""


def given(text: str) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


class Caller:
    def __init__(self, *shape: int) -> None:
        rows = shape[0]
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        self.inputs = {"r": Tensor(array), "x": Tensor(np.full((rows, 1), rows, np.float32))}
        self.made: Tensors | EdgeServerError | None = None

    def __call__(
        self,
        made: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        assert final
        assert not parameters
        self.made = made

    def output(self, name: str) -> list[object]:
        assert isinstance(self.made, dict)
        found: list[object] = self.made[name].array.tolist()
        return found

    def request(self, *outputs: str) -> ExecuteRequest:
        request = InferRequest("m", self.inputs)
        return ExecuteRequest(self.inputs, frozenset(outputs), self, request, Snapshot({}))


def run(text: str, model: Run, *callers: Caller, outputs: tuple[str, ...] = ("y",)) -> None:
    config = given(IO + text)
    assert config.ragged is not None
    instance = RaggedInstance(model, config, config.ragged)
    instance.execute([caller.request(*outputs) for caller in callers])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 8]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 14]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 14]),
        ("BATCH_ITEM_SHAPE", [[3, 2], [2, 2], [2, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 2, 2, 2, 2, 2]),
    ],
)
@pytest.mark.parametrize(("name", "dtype"), [("TYPE_INT32", "int32"), ("TYPE_FP32", "float32")])
def test_a_batch_input_is_made_from_the_shapes_of_the_requests(
    kind: str, expected: object, name: str, dtype: str
) -> None:
    seen: dict[str, Tensor] = {}

    def model(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        seen.update(inputs)
        return {"y": inputs["x"]}

    callers = [Caller(1, 3, 2), Caller(2, 2, 2)]
    text = f'batch_input {{ kind: {kind} target_name: "b" data_type: {name} source_input: "r" }}'
    run(text, model, *callers)
    assert seen["b"].array.tolist() == expected
    assert seen["b"].array.dtype == dtype
    assert seen["r"].array.tolist() == [*range(6), *range(8)]
    assert seen["x"].shape == (3, 1)
    assert [caller.output("y") for caller in callers] == [[[1]], [[2], [2]]]


def test_the_largest_count_is_the_shape_of_a_batch_input_whatever_its_elements() -> None:
    def model(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        assert inputs["a"].shape == inputs["b"].shape == (8,)
        return {"y": inputs["x"]}

    caller = Caller(1, 3, 2)
    kind = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    text = (
        f'batch_input {{ kind: {kind} target_name: ["a", "b"] data_type: TYPE_FP32 '
        'source_input: "r" }'
    )
    run(text, model, caller, Caller(1, 4, 2))
    assert caller.output("y") == [[1]]


SCATTERED = 'batch_output { target_name: "s" source_input: "r" }'


def test_a_batch_output_is_shared_out_by_the_shapes_of_its_source() -> None:
    def model(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        return {"s": inputs["r"], "y": inputs["x"]}

    one, two = Caller(1, 3, 2), Caller(2, 2, 2)
    run(SCATTERED, model, one, two, outputs=("s",))
    assert one.output("s") == one.inputs["r"].array.tolist()
    assert two.output("s") == two.inputs["r"].array.tolist()


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("s", "output 's' has 2 elements; the shapes of 'r' ask for 14"),
        ("y", "output 'y' has shape [2] for a batch of 3"),
    ],
)
def test_an_output_that_cannot_be_shared_out_fails_every_request(output: str, text: str) -> None:
    def model(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        return {output: Tensor(np.zeros(2, np.float32))}

    callers = [Caller(1, 3, 2), Caller(2, 2, 2)]
    run(SCATTERED, model, *callers, outputs=(output,))
    for caller in callers:
        assert isinstance(caller.made, InternalError)
        assert str(caller.made) == text
