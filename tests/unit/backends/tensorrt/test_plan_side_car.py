"""Before TensorRT sees a plan, its side-car says whether it is for this device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from edge_server.backends.tensorrt.plan_options import (
    DeviceFacts,
    Placed,
    PlanTensor,
    Range,
    SideCar,
    cautions,
    compare,
    encode,
    read_side_car,
    sha256_of,
    side_car_faults,
    side_car_path,
)
from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from pathlib import Path

ORIN = DeviceFacts("10.3.0.30", "8.7", "Orin", 16, "36.4.3", 2)
MODEL = "laneDetect_model"
REMEDY = "run `edge-server plan build laneDetect_model`"


def side_car(**changes: object) -> SideCar:
    return replace(
        SideCar(
            onnx_sha256="",
            plan_sha256="",
            options="w",
            built_with=ORIN,
            precision="fp16",
            dla_core=None,
            profiles=({"x": Range((1, 3), (2, 3), (4, 3))},),
            tensors=(PlanTensor("x", True, "FP32", (-1, 3), "LINEAR"),),
            placed=Placed(("a",), ("b", "c"), 2),
        ),
        **changes,
    )


def test_a_plan_runs_where_it_was_built() -> None:
    assert compare(side_car(), ORIN, MODEL) == []
    assert compare(side_car(dla_core=1), ORIN, MODEL) == []


def test_another_tensorrt_is_told_with_both_and_the_remedy() -> None:
    assert compare(side_car(), replace(ORIN, tensorrt="10.16.2.1"), MODEL) == [
        f"built with TensorRT 10.3 for sm_87, this device has TensorRT 10.16 and sm_87; {REMEDY}"
    ]


def test_versions_are_as_long_as_they_must_be_to_differ() -> None:
    (said,) = compare(side_car(), replace(ORIN, tensorrt="10.3.0.26"), MODEL)
    assert said.startswith("built with TensorRT 10.3.0.30 for sm_87, this device has TensorRT")
    assert "10.3.0.26" in said


def test_another_gpu_is_told() -> None:
    assert compare(side_car(), replace(ORIN, compute_capability="9.0"), MODEL) == [
        f"built with TensorRT 10.3 for sm_87, this device has TensorRT 10.3 and sm_90; {REMEDY}"
    ]


def test_a_power_mode_with_fewer_multiprocessors_is_warned_of_and_runs() -> None:
    fewer = replace(ORIN, multiprocessors=8)
    assert compare(side_car(), fewer, MODEL) == []
    assert cautions(side_car(), fewer, MODEL) == [
        "built for 16 multiprocessors of Orin, this device has 8 of Orin: another module, or "
        f"another power mode; for the best speed {REMEDY}"
    ]
    assert cautions(side_car(), ORIN, MODEL) == []


def test_a_device_without_anything_is_told() -> None:
    assert compare(side_car(built_with=replace(ORIN, l4t="")), DeviceFacts(), MODEL) == [
        f"built with TensorRT 10.3 for sm_87, this device has TensorRT none and no GPU; {REMEDY}"
    ]


@pytest.mark.parametrize("l4t", ["36.4.7", "36.5.0"])
def test_another_jetson_linux_counts_for_nvdla_only(l4t: str) -> None:
    newer = replace(ORIN, l4t=l4t)
    assert compare(side_car(), newer, MODEL) == []
    assert cautions(side_car(), newer, MODEL) == [
        f"built on Jetson Linux 36.4.3, this device has {l4t}; for the best speed {REMEDY}"
    ]
    assert cautions(side_car(dla_core=0), newer, MODEL) == []
    assert compare(side_car(dla_core=0), newer, MODEL) == [
        f"built on Jetson Linux 36.4.3, this device has {l4t}; {REMEDY}"
    ]


@pytest.mark.parametrize("core", [None, 0])
def test_a_container_that_does_not_see_jetson_linux_runs_the_plan(core: int | None) -> None:
    assert compare(side_car(dla_core=core), replace(ORIN, l4t=""), MODEL) == []
    assert cautions(side_car(dla_core=core), replace(ORIN, l4t=""), MODEL) == []


def test_a_plan_for_nvdla_where_there_is_none_says_what_to_change() -> None:
    found = compare(side_car(dla_core=0), replace(ORIN, tensorrt="10.16.2", dla_cores=0), MODEL)
    assert found[1] == (
        "built for NVDLA, of which this device has none with TensorRT 10.16; take "
        f"secondary_devices out of the model's instance_group, and {REMEDY}"
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    assert read_side_car(plan) is None
    side_car_path(plan).write_bytes(encode(side_car()))
    assert read_side_car(plan) == side_car()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format": 1}', b"\xff", b'{"trtexec": "\xff"}', b"[" * 100_000]
)
def test_what_is_no_side_car_is_told_with_the_remedy(data: bytes, tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    side_car_path(plan).write_bytes(data)
    with pytest.raises(ModelConfigError, match=r"model\.plan\.json: is no side-car of a plan"):
        read_side_car(plan)


def test_a_side_car_of_a_later_format_is_not_guessed_at(tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    side_car_path(plan).write_bytes(encode(side_car(format=3)))
    with pytest.raises(ModelConfigError, match="is of format 3, this edge-server knows 2"):
        read_side_car(plan)


def test_files_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    plan, onnx = tmp_path / "model.plan", tmp_path / "model.onnx"
    plan.write_bytes(b"plan")
    onnx.write_bytes(b"onnx")
    good = side_car(onnx_sha256=sha256_of(onnx), plan_sha256=sha256_of(plan))
    assert side_car_faults(good, plan, onnx, ORIN, MODEL) == []
    assert side_car_faults(good, plan, None, ORIN, MODEL) == []
    onnx.write_bytes(b"another")
    plan.write_bytes(b"flipped")
    assert side_car_faults(good, plan, onnx, ORIN, MODEL) == [
        f"model.plan is not the file that model.plan.json speaks of; {REMEDY}",
        f"model.plan was built of another model.onnx than is there; {REMEDY}",
    ]
