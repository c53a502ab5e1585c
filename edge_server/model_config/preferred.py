"""Which configuration of a model is to serve: config.pbtxt, or one that it prefers.

A model may have further configurations, `configs/NAME.pbtxt`. As in Triton, one takes the place of
config.pbtxt where the setting `config_name` names it. The parameter `preferred_configs` in
config.pbtxt, which Triton ignores, asks for more: of the configurations that it lists, and before
them the one that the setting names, the first serves that has its devices here and can be loaded.
Until then, and where there is none, config.pbtxt serves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import CONFIGS_DIRECTORY, outside
from edge_server.model_config.parse import read_model_config

if TYPE_CHECKING:
    from edge_server.model_config.config import Completion, ModelConfig
    from edge_server.model_config.files import ModelFiles

PREFERRED_CONFIGS = "preferred_configs"


def configurations(files: ModelFiles, config_name: str) -> list[tuple[ModelFiles, Any]]:
    """Return the configurations of a model in the order of preference, each with its message; the
    one that needs no device comes last.

    Raises:
        ModelConfigError: a configuration cannot be read, or one that is preferred is missing.
    """
    custom = files.with_custom_config(config_name)
    names: list[str] = []
    try:
        message = read_model_config(files.config_path)
    except ModelConfigError:
        # As in Triton, it is not read where another one takes its place.
        if custom is files:
            raise
        message = pb.ModelConfig()
    if PREFERRED_CONFIGS in message.parameters:
        listed = message.parameters[PREFERRED_CONFIGS].string_value.split(",")
        names = [name.strip() for name in listed if name.strip()]
    if not names:
        return [(custom, message if custom is files else read_model_config(custom.config_path))]
    if custom is not files:
        names = [config_name, *(name for name in names if name != config_name)]
    preferred = [_preferred(files, name) for name in names]
    return [*((each, read_model_config(each.config_path)) for each in preferred), (files, message)]


def _preferred(files: ModelFiles, name: str) -> ModelFiles:
    path = f"{CONFIGS_DIRECTORY}/{name}.pbtxt"
    if outside(files.directory, path) or not (files.directory / path).is_file():
        raise ModelConfigError(
            f"{files.config_path}: parameter {PREFERRED_CONFIGS} names '{name}', and there is no "
            f"{path} beside it; write that file, or take the name out of the parameter"
        )
    return replace(files, config_name=path)


def missing_device(message: Any, completion: Completion, library: str) -> str:
    """Return which device a completed configuration lacks on this machine; "" if it lacks none.

    Args:
        library: the library that its backend lacks here; "" if it lacks none.
    """
    on_gpu = any(g.kind == pb.ModelInstanceGroup.KIND_GPU for g in message.instance_group)
    if on_gpu and not completion.gpus:
        return f"there is no GPU: {completion.no_gpu}"
    return f"{library} is not installed" if library else ""


def devices_of(config: ModelConfig) -> str:
    """Return the devices of a model's instances, as `GPU 0`, `NVDLA core 1 of GPU 0` or `CPU`."""
    found: dict[str, None] = {}
    for group in config.instance_groups:
        for each in group.placements:
            place = "CPU" if each.gpu is None else f"GPU {each.gpu}"
            core = "" if each.dla_core is None else f"NVDLA core {each.dla_core} of "
            found[core + place] = None
    return ", ".join(found)
