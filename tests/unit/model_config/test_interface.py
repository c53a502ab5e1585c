"""A configuration that gives callers less than another one expected where."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.config import ModelConfig
from edge_server.model_config.parse import interface_break, unified

INPUT = 'input {{ name: "{}" data_type: TYPE_{} dims: [{}] {} }} '
OUTPUT = 'output {{ name: "{}" data_type: TYPE_{} dims: [{}] }} '
A = INPUT.format("a", "FP32", "3, 4", "")
B = OUTPUT.format("b", "FP32", "2", "")
BATCHES = "max_batch_size: 8 "


def config(text: str) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(f'name: "m" backend: "x" {text}', pb.ModelConfig()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (A + B, A + B),
        (A + B, A + INPUT.format("c", "FP16", "1", "optional: true") + B),
        (A + B, A + B + OUTPUT.format("c", "FP16", "1")),
        (A + B, INPUT.format("a", "FP32", "-1, 4", "") + B),
        (A + B, INPUT.format("a", "FP32", "3, 4", "optional: true") + B),
        (A + B, A + OUTPUT.format("b", "FP32", "-1")),
        (A + OUTPUT.format("b", "FP32", "-1"), A + B),
        (BATCHES + A + B, "max_batch_size: 16 " + A + B),
        # The same shapes, the batch in them or before them.
        (
            BATCHES + A + B,
            INPUT.format("a", "FP32", "-1, 3, 4", "") + OUTPUT.format("b", "FP32", "-1, 2"),
        ),
        (
            INPUT.format("a", "FP32", "1, 3, 4", "") + OUTPUT.format("b", "FP32", "1, 2"),
            BATCHES + A + B,
        ),
        ("model_transaction_policy { decoupled: true } " + A + B, A + B),
        ("sequence_batching {} " + A + B, A + B),
    ],
)
def test_what_gives_callers_the_same_or_more_breaks_no_caller(old: str, new: str) -> None:
    assert interface_break(config(old), config(new)) == ""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (A + B, B, "input 'a' is gone"),
        (A + B, A, "output 'b' is gone"),
        (A + B, INPUT.format("c", "FP32", "3, 4", "") + B, "input 'a' is gone"),
        (A + B, A + INPUT.format("c", "FP32", "1", "") + B, "input 'c' is new and not optional"),
        (A + B, INPUT.format("a", "FP16", "3, 4", "") + B, "input 'a' is FP16, was FP32"),
        (A + B, A + OUTPUT.format("b", "INT32", "2"), "output 'b' is INT32, was FP32"),
        (A + B, INPUT.format("a", "FP32", "3, 5", "") + B, "input 'a' has shape [3,5], had [3,4]"),
        (A + B, INPUT.format("a", "FP32", "12", "") + B, "input 'a' has shape [12], had [3,4]"),
        (
            INPUT.format("a", "FP32", "-1, 4", "") + B,
            A + B,
            "input 'a' has shape [3,4], had [-1,4]",
        ),
        (A + B, A + OUTPUT.format("b", "FP32", "3"), "output 'b' has shape [3], had [2]"),
        (A + B, A + OUTPUT.format("b", "FP32", "2, 1"), "output 'b' has shape [2,1], had [2]"),
        (
            INPUT.format("a", "FP32", "3, 4", "optional: true") + B,
            A + B,
            "input 'a' is not optional any more",
        ),
        (BATCHES + A + B, A + B, "input 'a' has shape [3,4], had [-1,3,4]"),
        (BATCHES + A + B, "max_batch_size: 4 " + A + B, "max_batch_size is 4, was 8"),
        (
            INPUT.format("a", "FP32", "-1, 3, 4", "") + B,
            BATCHES + A + OUTPUT.format("b", "FP32", "-1"),
            "input 'a' has shape [-1,3,4], had [-1,3,4]",
        ),
        (
            A + B,
            "model_transaction_policy { decoupled: true } " + A + B,
            "it is decoupled now, which only streams can call",
        ),
        (A + B, "sequence_batching {} " + A + B, "its requests need a correlation id now"),
    ],
)
def test_what_gives_callers_less_names_the_break(old: str, new: str, why: str) -> None:
    assert interface_break(config(old), config(new)) == why


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ((-1, 3), (4, -1), (4, 3)),
        ((-1,), (-1,), (-1,)),
        ((), (), ()),
        ((3,), (4,), None),
        ((-1,), (-1, -1), None),
    ],
)
def test_the_fixed_size_wins_whichever_side_has_it(
    a: tuple[int, ...], b: tuple[int, ...], both: tuple[int, ...] | None
) -> None:
    assert unified(a, b) == both
    assert unified(b, a) == both
