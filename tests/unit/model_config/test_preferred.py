"""Which configurations a model has, in which order, and on which devices they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError
from edge_server.lifecycle.model_spec import ModelSpec
from edge_server.model_config.completion import configurations, devices_of
from edge_server.model_config.config import Completion
from edge_server.repository.scan import files_in

if TYPE_CHECKING:
    from pathlib import Path

    from support.model_folders import WriteModel

IDENTITY = 'backend: "identity" '
PREFERS = IDENTITY + 'parameters { key: "preferred_configs" value { string_value: "gpu, fast" } }'
ON_GPU = 'backend: "image_preprocess" instance_group { kind: KIND_GPU } '


@pytest.fixture
def model(write_model: WriteModel) -> Path:
    directory = write_model("m", PREFERS)
    (directory / "configs").mkdir()
    for name, text in {"gpu": ON_GPU, "fast": IDENTITY, "other": IDENTITY}.items():
        (directory / "configs" / f"{name}.pbtxt").write_text(text)
    return directory


def names(model: Path, config_name: str = "") -> list[str]:
    return [files.config_name for files, _ in configurations(files_in(model), config_name)]


def test_the_listed_ones_come_first_and_before_them_the_one_of_the_setting(model: Path) -> None:
    gpu, fast, last = "configs/gpu.pbtxt", "configs/fast.pbtxt", "config.pbtxt"
    assert names(model) == [gpu, fast, last]
    assert names(model, "fast") == [fast, gpu, last]
    assert names(model, "other") == ["configs/other.pbtxt", gpu, fast, last]
    assert names(model, "absent") == [gpu, fast, last]


def test_without_the_parameter_it_is_as_in_triton(model: Path) -> None:
    (model / "config.pbtxt").write_text(IDENTITY)
    assert names(model) == ["config.pbtxt"]
    assert names(model, "other") == ["configs/other.pbtxt"]
    (model / "config.pbtxt").write_text("no configuration")
    assert names(model, "other") == ["configs/other.pbtxt"]
    (model / "config.pbtxt").unlink()
    assert names(model, "other") == ["configs/other.pbtxt"]
    assert names(model) == ["config.pbtxt"]


@pytest.mark.parametrize("name", ["gone", "../../m/configs/fast"])
def test_a_preferred_one_that_is_missing_is_named_with_the_remedy(model: Path, name: str) -> None:
    (model / "config.pbtxt").write_text(PREFERS.replace("gpu", name))
    with pytest.raises(ModelConfigError, match=f"names '{name}', and there is no configs/"):
        names(model)


@pytest.mark.parametrize("jetson", [False, True])
def test_one_whose_device_is_not_here_is_left_out_and_degrades_a_jetson_alone(
    model: Path, jetson: bool
) -> None:
    completion = Completion(no_gpu="no driver", jetson=jetson)
    spec = ModelSpec.read(files_in(model), completion=completion)
    assert spec.files.config_name == "configs/fast.pbtxt"
    assert spec.why == "configs/gpu.pbtxt: there is no GPU: no driver"
    assert spec.is_degraded is jetson
    assert spec.fallback is not None
    assert spec.fallback.files.config_name == "config.pbtxt"
    assert spec.fallback.fallback is None


def test_a_setting_that_names_none_of_them_is_told(model: Path) -> None:
    spec = ModelSpec.read(files_in(model), completion=Completion(gpus=1, config_name="gup"))
    assert spec.files.config_name == "configs/gpu.pbtxt"
    assert spec.why == "configs/gup.pbtxt, which config_name asks for: there is none"


def test_the_devices_are_those_of_the_instances(model: Path) -> None:
    spec = ModelSpec.read(files_in(model), completion=Completion(gpus=2))
    assert (spec.files.config_name, devices_of(spec.config)) == (
        "configs/gpu.pbtxt",
        "GPU 0, GPU 1",
    )
    assert spec.why == ""
