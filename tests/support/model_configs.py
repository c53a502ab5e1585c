"""Configurations of models, from the text of a config.pbtxt."""

from __future__ import annotations

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from edge_server.model_config.config import ModelConfig


def config_of(text: str) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, model_config_pb2.ModelConfig()))
