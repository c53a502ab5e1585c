"""The configuration that `initialize` gets: Triton's JSON form."""

from __future__ import annotations

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.parse import config_json

TEXT = """
name: "m" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 2 ] } }
dynamic_batching { max_queue_delay_microseconds: 100 }
parameters { key: "dims" value { string_value: "mine" } }
metric_tags { key: "model_version" value: "v2" }
model_warmup { inputs { key: "parameters" value { dims: 3 zero_data: true } } }
"""


def test_fields_have_their_protobuf_names_and_unset_ones_are_there() -> None:
    made = config_json(text_format.Parse(TEXT, pb.ModelConfig()))
    assert made["max_batch_size"] == 4
    assert made["input"][0]["data_type"] == "TYPE_FP32"
    assert made["input"][0]["optional"] is False
    assert made["instance_group"] == []
    assert made["parameters"] == {"dims": {"string_value": "mine"}}
    assert made["metric_tags"] == {"model_version": "v2"}


def test_shapes_and_times_are_numbers() -> None:
    made = config_json(text_format.Parse(TEXT, pb.ModelConfig()))
    assert made["input"][0]["dims"] == [-1, 3]
    assert made["output"][0]["reshape"]["shape"] == [2, 2]
    assert made["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert made["model_warmup"][0]["inputs"]["parameters"]["dims"] == [3]


def test_it_can_be_read_back() -> None:
    message = text_format.Parse(TEXT, pb.ModelConfig())
    assert json_format.ParseDict(config_json(message), pb.ModelConfig()) == message
