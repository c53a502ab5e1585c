"""What the settings say of cameras reaches what loads models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.daemon.parts import chosen_control
from edge_server.errors import ModelConfigError
from edge_server.gpu.device import Devices
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.settings import Repository

if TYPE_CHECKING:
    from pathlib import Path

    from support.model_folders import WriteModel


def identity(image: str, points: str) -> str:
    return (
        f'backend: "identity" input {{ name: "{image}" data_type: TYPE_FP32 dims: -1 }} '
        f'output {{ name: "{points}" data_type: TYPE_FP32 dims: -1 }} '
        'parameters { key: "allow_interface_change" value { string_value: "true" } }'
    )


def test_the_model_of_a_camera_keeps_what_it_gives(
    repository: Path, write_model: WriteModel
) -> None:
    scheduling, registry = Scheduling(), ModelRegistry()
    settings = Repository(paths=(str(repository),), mode="explicit")
    camera_models: set[str] = set()
    control = chosen_control(registry, scheduling, Devices(), settings, camera_models=camera_models)
    # A camera that is added later counts from then on.
    camera_models.add("lanes")
    for name in ("lanes", "other"):
        write_model(name, identity("image", "lane_points"))
        control.load(name)
        write_model(name, identity("image", "points"))
    control.load("other")
    with pytest.raises(ModelConfigError, match=r"a camera uses it: .*'lanes' takes no image"):
        control.load("lanes")
    control.close(30.0)
    scheduling.close()
