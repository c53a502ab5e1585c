"""Target: finds a model's files by its name or directory, or a single ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.plan_cache import PLAN_NAME
from edge_server.backends.tensorrt.plan_options import BuildOptions, build_options_of
from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import reading, require_path
from edge_server.model_config.parse import read_model_config
from edge_server.repository.scan import Repositories, files_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.model_config.files import ModelFiles

_ONNX_NAME = "model.onnx"


@dataclass(frozen=True)
class Target:
    """One model version's plan.

    Attributes:
        name: the name in texts, and the argument for further verbs.
        options: of the build, from its configuration.
        files: None for a single ONNX file.
        config: as written, not completed from the model's file; None for a single ONNX file.
    """

    name: str
    onnx: Path
    plan: Path
    options: BuildOptions
    files: ModelFiles | None = None
    config: ModelConfig | None = None
    version: int = 1


def find_target(model: str, repositories: Sequence[Path], version: int | None = None) -> Target:
    """Return the paths of `model`'s files, whether or not the files exist.

    Raises:
        ModelConfigError: the model or version does not exist, or its configuration is wrong.
    """
    path = Path(model)
    if path.suffix == ".onnx":
        return Target(model, path, path.with_suffix(".plan"), BuildOptions())
    # A name of the repository wins over a directory of that name in the current one.
    files = Repositories(repositories).find(model) or (files_in(path) if path.is_dir() else None)
    if files is None:
        raise ModelConfigError(
            f"no model '{model}' in {', '.join(map(str, repositories))}, and no directory of that "
            "name; give --model-repository DIR"
        )
    if isinstance(files, ModelConfigError):
        raise files
    if not files.versions:
        raise ModelConfigError(f"{files.directory}: no version directory, like {files.name}/1")
    chosen = version or max(files.versions)
    if chosen not in files.versions:
        has = ", ".join(map(str, files.versions))
        raise ModelConfigError(f"{files.directory}: no version {chosen}; there are: {has}")
    config = _config(files)
    directory = files.versions[chosen]
    filename = config.default_model_filename
    return Target(
        model,
        directory / (filename if filename.endswith(".onnx") else _ONNX_NAME),
        directory / (filename if filename.endswith(".plan") else PLAN_NAME),
        build_options_of(config),
        files,
        config,
        chosen,
    )


def require_onnx(target: Target) -> None:
    """Raises: ModelConfigError: the ONNX file is missing or unreadable."""
    with reading(target.onnx):
        if not target.onnx.exists():
            raise ModelConfigError(
                f"{target.onnx}: missing; a plan is built from an ONNX file: put it there"
            )
    require_path(target.onnx, target.name)


def _config(files: ModelFiles) -> ModelConfig:
    message = read_model_config(files.config_path)
    complete(message, files)
    if message.platform == "ensemble":
        raise ModelConfigError(
            f"{files.config_path}: an ensemble has no plan of its own; build those of its members"
        )
    return ModelConfig.of(message)
