"""The model that a request fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritonclient.grpc import model_config_pb2

from edge_server.api.contents import DATATYPES
from edge_server.model_config.config import ModelConfig
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2 as pb


def model_of(message: pb.ModelInferRequest) -> ModelConfig:
    """A model that takes the tensors of `message`, in any shape, and gives those that it wants."""
    config = model_config_pb2.ModelConfig(name="m")
    for name, tensor in {each.name: each for each in message.inputs}.items():
        datatype = DATATYPES.get(tensor.datatype, DataType.FP32)
        dims = [-1] * len(tensor.shape)
        config.input.add(name=name, data_type=datatype.config_name, dims=dims)
    for name in {each.name for each in message.outputs}:
        config.output.add(name=name, data_type="TYPE_FP32", dims=[-1])
    return ModelConfig.of(config)
