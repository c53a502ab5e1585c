"""Plans that load, that do not, and where; GPU and TensorRT are simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from integration.tensorrt_simulated.test_loading import PROFILES, X, with_side_car
from support.workshop import Asked, add_one

from edge_server.backends.tensorrt.plan_options import (
    sha256_of,
    side_car_path,
)
from edge_server.board.board import NVDLA_SUPPORT
from edge_server.errors import EdgeServerError, ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.workshop import Workshop

DLA = "instance_group { kind: KIND_GPU secondary_devices { kind: KIND_NVDLA device_id: %d } }"


@pytest.mark.parametrize("version", ["8.6.1.6", "10.3.0.30", "10.16.2.1", "11.4.1.1"])
@pytest.mark.parametrize("side_car", [True, False])
def test_a_plan_runs_on_every_version_with_and_without_a_side_car(
    workshop: Workshop, ask: Callable[..., Asked], version: str, side_car: bool
) -> None:
    workshop.tensorrt(f"version={version}")
    workshop.write(add_one(("n", 4)), profiles=PROFILES, side_car=side_car)
    instance = workshop.instance()
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("version", ["8.6.1.6", "10.16.2.1", "11.4.1.1"])
def test_the_memory_of_a_plan_is_its_file_what_tensorrt_reports_and_what_is_allocated(
    workshop: Workshop, version: str, mapped: bool
) -> None:
    """Profiles of up to 4 rows of 4 numbers; a context of the simulated TensorRT has 1 MiB."""
    workshop.tensorrt(f"version={version}")
    workshop.write(add_one(("n", 4)), profiles=PROFILES, context_bytes=1 << 20)
    value = f'value {{ string_value: "{str(mapped).lower()}" }}'
    config = workshop.complete(f'parameters {{ key: "mapped_memory" {value} }}')
    model = workshop.model(config)
    assert model.memory_bytes() == {"file": 0, "contexts": 0, "buffers": 0}
    (placement,) = config.instance_groups[0].placements
    instances = [model.make_instance(f"m_{number}", placement) for number in range(2)]
    found = model.memory_bytes()
    plans = 1 if version != "8.6.1.6" else 2
    assert found["file"] == plans * workshop.plan.stat().st_size
    assert found["contexts"] == 2 << 20
    # Input and output, each on the device, and pinned where the device cannot read the host's.
    assert found["buffers"] == 2 * 2 * (4 * 4 * 4) * (1 if mapped else 2)
    for instance in instances:
        instance.close()
    assert model.memory_bytes()["contexts"] == model.memory_bytes()["buffers"] == 0


@pytest.mark.parametrize(
    ("spoil", "expected_text"),
    [
        (lambda data: data[: len(data) // 2], "unable to create TensorRT engine: .*cut short"),
        (lambda data: b"onnx" + data, "Magic tag does not match"),
        (lambda data: b"", "Magic tag does not match"),
    ],
)
def test_a_spoilt_plan_is_refused_with_tensorrts_own_words(
    workshop: Workshop, spoil: Callable[[bytes], bytes], expected_text: str
) -> None:
    workshop.write(side_car=False)
    workshop.plan.write_bytes(spoil(workshop.plan.read_bytes()))
    with pytest.raises(ModelConfigError, match=expected_text) as caught:
        workshop.complete()
    assert "unable to load plan file to auto complete config: " in str(caught.value)


def test_a_plan_of_another_tensorrt_without_side_car_is_told_with_both_versions(
    workshop: Workshop,
) -> None:
    workshop.write(side_car=False, version="8.6.1.6")
    with pytest.raises(ModelConfigError, match=r"Engine Version: 8\.6\.1\.6") as caught:
        workshop.complete()
    assert "TensorRT 10.3.0.30 is here: run `edge-server plan build m`" in str(caught.value)


def test_a_plan_that_nobody_vouches_for_and_that_kills_its_reader_kills_another_process(
    workshop: Workshop,
) -> None:
    workshop.write(side_car=False)
    workshop.tensorrt("crash=deserialize")
    with pytest.raises(ModelConfigError, match="the process that read it died of SIGABRT"):
        workshop.complete()


def test_a_plan_that_tensorrt_does_not_take_is_built_anew_once(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    workshop.write()
    onnx = workshop.plan.parent / "model.onnx"
    onnx.write_bytes(add_one())
    with_side_car(workshop, onnx_sha256=sha256_of(onnx))
    auto = 'parameters { key: "auto_build" value { string_value: "true" } }'
    workshop.trt.set("fail=deserialize:0")
    workshop.instance(auto)
    workshop.unload()
    (cached,) = (tmp_path / "state" / "plans").glob("*/model.plan")
    first = cached.stat().st_mtime_ns
    # Nor is what was kept of that; and what was built just now is not built again.
    with_side_car(workshop, onnx_sha256="another")
    workshop.trt.set("fail=deserialize:0")
    workshop.instance(auto)
    workshop.unload()
    assert cached.stat().st_mtime_ns != first
    onnx.write_bytes(add_one((1, 8)))
    workshop.trt.set("fail=deserialize:0")
    with pytest.raises(ModelConfigError, match="unable to create TensorRT engine"):
        workshop.instance(auto)


@pytest.mark.parametrize("side_car", [True, False])
def test_an_nvdla_core_that_is_not_there_makes_the_model_unavailable_with_the_reason(
    workshop: Workshop, side_car: bool
) -> None:
    workshop.write(dla=True, side_car=side_car)
    workshop.tensorrt("dla_cores=0")
    with pytest.raises(EdgeServerError) as caught:
        workshop.instance(DLA % 0)
    assert (
        "unable to create TensorRT runtime with DLA Core ID: 0, available number of DLA cores: 0"
    ) in str(caught.value)
    assert NVDLA_SUPPORT in str(caught.value)


FALLBACK = ' parameters { key: "dla_fallback" value { string_value: "gpu" } }'


@pytest.mark.parametrize("side_car", [True, False])
def test_where_the_configuration_allows_it_the_gpu_takes_the_place_of_nvdla(
    workshop: Workshop,
    ask: Callable[..., Asked],
    caplog: pytest.LogCaptureFixture,
    side_car: bool,
) -> None:
    workshop.write(side_car=side_car)
    beside = workshop.plan.with_name("model.gpu.plan")
    workshop.plan.rename(beside)
    if side_car:
        side_car_path(workshop.plan).rename(side_car_path(beside))
    workshop.write(dla=True, side_car=side_car)
    instance: Any = workshop.instance(DLA % 0 + FALLBACK)
    assert instance.engine.dla_core == 0
    workshop.tensorrt("dla_cores=0")
    instance = workshop.instance(DLA % 0 + FALLBACK)
    assert instance.engine.dla_core is None
    assert "runs on the GPU alone" in caplog.text
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)
