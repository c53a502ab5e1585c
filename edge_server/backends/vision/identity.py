"""`identity`: each output is the input at the same position, of any type. No copy is made.

An output whose optional input is absent cannot be computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.backends.contract import BackendParameters, TensorModel, Tensors, check_parameters
from edge_server.errors import InvalidRequest, ModelConfigError

if TYPE_CHECKING:
    from edge_server.backends.contract import LoadContext
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Validate the configuration.

    Raises:
        ModelConfigError: inputs and outputs do not pair up, or the configuration has states or
            parameters.
    """
    del version
    if config.sequence_batching is not None and config.sequence_batching.states:
        raise ModelConfigError(
            f"{files.config_path}: an identity model gives no states; remove 'state' from "
            "'sequence_batching'"
        )
    if not config.inputs or [(s.datatype, config.model_shape(s)) for s in config.inputs] != [
        (s.datatype, config.model_shape(s)) for s in config.outputs
    ]:
        raise ModelConfigError(
            f"{files.config_path}: an identity model has one output for each input, of the same "
            "data_type and dims and in the same order"
        )
    check_parameters(files, config, BackendParameters)
    return config


def load(context: LoadContext) -> TensorModel:
    config = context.config
    source = {o.name: i.name for i, o in zip(config.inputs, config.outputs, strict=True)}

    def run(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        for name in outputs:
            if source[name] not in inputs:
                raise InvalidRequest(
                    f"output '{name}' of model '{config.name}' is its input '{source[name]}', "
                    "which was left out; name other outputs, or give it"
                )
        return {name: inputs[source[name]] for name in outputs}

    return TensorModel(run)
