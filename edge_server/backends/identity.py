"""`identity`: each output is the input at the same place. No copy is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.backends.contract import Placement, TensorModel, Tensors
from edge_server.backends.parameters import Parameters, check_parameters
from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Raises: ModelConfigError: inputs and outputs do not pair up, or there are parameters."""
    del version
    if not config.inputs or [(s.datatype, s.shape) for s in config.inputs] != [
        (s.datatype, s.shape) for s in config.outputs
    ]:
        raise ModelConfigError(
            f"{files.config_path}: an identity model has one output for each input, of the same "
            "data_type and dims and in the same order"
        )
    check_parameters(files, config, Parameters)
    return config


def load(directory: Path, config: ModelConfig, placement: Placement) -> TensorModel:
    del directory, placement
    source = {o.name: i.name for i, o in zip(config.inputs, config.outputs, strict=True)}

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        return {name: inputs[source[name]] for name in outputs}

    return TensorModel(run)
