"""Where a model's files are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG_NAME = "config.pbtxt"


@dataclass(frozen=True)
class ModelFiles:
    """One model directory of a repository.

    Attributes:
        name: the model's name, which is the directory's.
        directory: holds config.pbtxt (optional) and the version directories.
        versions: version number → its directory, in ascending order.
    """

    name: str
    directory: Path
    versions: Mapping[int, Path]

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG_NAME
