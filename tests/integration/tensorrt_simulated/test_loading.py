"""Plans that load, that do not, and where; GPU and TensorRT are simulated."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.workshop import Asked, add_one

from edge_server.backends import find_backend
from edge_server.backends.contract import LoadContext
from edge_server.backends.tensorrt.plan_options import (
    encode,
    read_side_car,
    side_car_path,
)
from edge_server.errors import EdgeServerError, ModelConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.workshop import Workshop

X = np.arange(4, dtype=np.float32).reshape(1, 4)
PROFILES = [{"x": ((1, 4), (2, 4), (4, 4))}]
DLA = "instance_group { kind: KIND_GPU secondary_devices { kind: KIND_NVDLA device_id: %d } }"


def with_side_car(workshop: Workshop, **changes: Any) -> None:
    found = read_side_car(workshop.plan)
    assert found is not None
    side_car_path(workshop.plan).write_bytes(encode(replace(found, **changes)))


def test_without_a_gpu_there_is_no_plan_and_no_fallback_to_the_processor(
    workshop: Workshop,
) -> None:
    workshop.write()
    with pytest.raises(ModelConfigError, match=r"supports only GPU device: .* give KIND_GPU"):
        workshop.complete("instance_group { kind: KIND_CPU }")
    workshop.gpu.set("init=100")
    workshop.start_over()
    text = (
        "unable to load model 'm', TensorRT backend supports only GPU device: instance group m is "
        "KIND_CPU; there is no GPU: no CUDA device: cuInit returns 100"
    )
    with pytest.raises(ModelConfigError) as caught:
        workshop.complete()
    assert text in str(caught.value)


@pytest.mark.parametrize("side_car", [True, False])
def test_a_missing_plan_is_named(workshop: Workshop, side_car: bool) -> None:
    workshop.write(side_car=side_car)
    workshop.plan.unlink()
    with pytest.raises(ModelConfigError, match=r"model\.plan: missing"):
        workshop.instance()


def test_a_plan_of_another_tensorrt_is_found_before_tensorrt_sees_it(workshop: Workshop) -> None:
    workshop.write()
    # Whatever sees the plan now, dies.
    workshop.tensorrt("version=10.16.2.1,crash=deserialize")
    with pytest.raises(ModelConfigError) as caught:
        workshop.instance()
    assert (
        "built with TensorRT 10.3 for sm_87, this device has TensorRT 10.16 and sm_87; run "
        "`edge-server plan build m`"
    ) in str(caught.value)


def test_a_plan_that_is_not_the_side_cars_is_not_loaded(workshop: Workshop) -> None:
    workshop.write()
    workshop.plan.write_bytes(workshop.plan.read_bytes() + b" ")
    with pytest.raises(ModelConfigError, match=r"is not the file that model\.plan\.json speaks of"):
        workshop.instance()


def test_what_a_plan_says_is_held_against_a_side_car_that_lies(workshop: Workshop) -> None:
    workshop.write()
    found = read_side_car(workshop.plan)
    assert found is not None
    lies = tuple(replace(tensor, name=f"{tensor.name}_") for tensor in found.tensors)
    with_side_car(workshop, tensors=lies)
    with pytest.raises(ModelConfigError, match="unexpected inference input 'x_', allowed inputs"):
        workshop.instance()


@pytest.mark.parametrize(
    ("fail", "expected_text"),
    [
        ("deserialize", "unable to create TensorRT engine: .*out of memory"),
        ("context", "no execution context on GPU 0: .*OutOfMemory.*fewer instances"),
    ],
)
def test_no_memory_for_a_plan_is_told_and_everything_is_given_back(
    workshop: Workshop, fail: str, expected_text: str
) -> None:
    workshop.write()
    workshop.instance()
    workshop.unload()
    gc.collect()
    before = workshop.gpu.device_bytes
    workshop.tensorrt(f"fail={fail}:0")
    with pytest.raises(EdgeServerError, match=expected_text):
        workshop.instance()
    workshop.unload()
    gc.collect()
    assert workshop.gpu.comes_to(before)


def test_no_memory_for_the_tensors_is_told(workshop: Workshop) -> None:
    workshop.gpu.set("integrated=0")
    workshop.write(add_one((1, 1 << 20)))
    gc.collect()
    before = workshop.gpu.device_bytes
    workshop.gpu.set(f"memory={before + (1 << 20)}")
    with pytest.raises(Unavailable, match="out of memory: fewer models, instances"):
        workshop.instance()
    workshop.unload()
    gc.collect()
    assert workshop.gpu.comes_to(before)


def test_all_device_memory_is_given_back(workshop: Workshop, ask: Callable[..., Asked]) -> None:
    workshop.write(add_one(("n", 4)), profiles=PROFILES)
    gc.collect()
    before = workshop.gpu.device_bytes
    for _ in range(2):
        loaded = workshop.loaded("instance_group { count: 2 kind: KIND_GPU }")
        assert workshop.gpu.device_bytes > before
        workshop.unload()
        del loaded
        gc.collect()
        assert workshop.gpu.comes_to(before)


@pytest.mark.parametrize(
    ("version", "shape", "loads"),
    [
        ("10.3.0.30", (1, 4), 1),
        ("10.3.0.30", ("n", 4), 1),
        ("8.6.1.6", (1, 4), 1),
        # Before 10 a profile with free dimensions is one context's.
        ("8.6.1.6", ("n", 4), 2),
    ],
)
def test_instances_share_a_loaded_plan_where_tensorrt_lets_them(
    workshop: Workshop,
    ask: Callable[..., Asked],
    version: str,
    shape: tuple[object, ...],
    loads: int,
) -> None:
    workshop.tensorrt(f"version={version}")
    workshop.write(add_one(shape), profiles=PROFILES if shape[0] == "n" else [])
    config = workshop.complete()
    model: Any = workshop.model(config)
    placement = config.instance_groups[0].placements[0]
    two = [model.make_instance(f"m_{i}", placement) for i in range(2)]
    assert len({id(each.engine) for each in two}) == loads
    for each in two:
        np.testing.assert_array_equal(ask(each, inputs={"x": X}).array(), X + 1)
        each.close()


@pytest.mark.parametrize("core", [0, 1])
def test_a_plan_with_parts_for_nvdla_is_loaded_on_the_core_that_is_named(
    workshop: Workshop, ask: Callable[..., Asked], core: int
) -> None:
    workshop.write(dla=True)
    instance: Any = workshop.instance(DLA % core)
    assert instance.engine.dla_core == core
    assert instance.engine._runtime.DLA_core == core
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)


def test_a_core_beyond_the_last_one_is_not_there(workshop: Workshop) -> None:
    workshop.write(dla=True)
    with pytest.raises(Unavailable, match="DLA Core ID: 2, available number of DLA cores: 2"):
        workshop.instance(DLA % 2)


@pytest.mark.parametrize(
    ("dla", "group", "expected_text"),
    [
        (True, "instance_group { kind: KIND_GPU }", "built for NVDLA core 0, and its instance is"),
        (False, DLA % 1, "built for the GPU alone, and its instance is to run on NVDLA core 1"),
    ],
)
def test_a_plan_for_another_place_than_its_instance_is_not_loaded_silently(
    workshop: Workshop, dla: bool, group: str, expected_text: str
) -> None:
    workshop.write(dla=dla)
    with pytest.raises(ModelConfigError, match=expected_text):
        workshop.instance(group)


FALLBACK = ' parameters { key: "dla_fallback" value { string_value: "gpu" } }'


def test_the_gpu_takes_that_place_with_a_plan_for_the_gpu_only(workshop: Workshop) -> None:
    workshop.write(dla=True)
    workshop.tensorrt("dla_cores=0")
    with pytest.raises(ModelConfigError, match=r"model\.gpu\.plan: missing"):
        workshop.instance(DLA % 0 + FALLBACK)


def test_parameters_that_mean_nothing_are_told_and_those_of_others_are_left_alone(
    workshop: Workshop,
) -> None:
    workshop.write()
    workshop.complete('parameters { key: "plan_precision" value { string_value: "fp16" } }')
    with pytest.raises(ModelConfigError, match="dla_fallback"):
        workshop.complete('parameters { key: "dla_fallback" value { string_value: "cpu" } }')


def test_no_runtime_is_made_where_there_is_no_driver(workshop: Workshop) -> None:
    """The real one could not even be let go of; the simulated one ends the process."""
    workshop.write()
    config = workshop.complete()
    workshop.gpu.set("init=100")
    workshop.start_over()
    model = find_backend("tensorrt").load(
        LoadContext(workshop.plan.parent, config, workshop.devices)
    )
    with pytest.raises(Unavailable, match="no CUDA device"):
        model.make_instance("m_0", config.instance_groups[0].placements[0])


def test_the_gpus_capability_chooses_the_file_where_the_configuration_says_so(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    beside = workshop.plan.with_name("orin.plan")
    workshop.plan.rename(beside)
    side_car_path(workshop.plan).rename(side_car_path(beside))
    files = 'cc_model_filenames { key: "8.7" value: "%s" }'
    instance = workshop.instance(files % "orin.plan")
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)
    with pytest.raises(ModelConfigError, match="leaves the version directory"):
        workshop.instance(files % "../orin.plan")
    with pytest.raises(ModelConfigError, match="missing"):
        workshop.instance()


def test_each_gpu_has_instances_and_takes_tensors_of_another_by_way_of_the_host(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.gpu.set("devices=2")
    workshop.start_over()
    workshop.write()
    group = "instance_group { kind: KIND_GPU gpus: [0, 1] }"
    first, second = workshop.instance(group), workshop.instance(group, at=1)
    made = ask(first, inputs={"x": X}, on_device=True).answer["y"]
    assert made.on_device.device.index == 0
    asked = ask(second, inputs={"x": made}, on_device=True)
    assert asked.answer["y"].on_device.device.index == 1
    assert ("to_host", 16) in asked.copied
    np.testing.assert_array_equal(asked.array(), X + 2)


def test_a_gpu_that_is_not_there_is_told(workshop: Workshop) -> None:
    workshop.write()
    with pytest.raises(Unavailable, match="there is no GPU 3: this machine has only GPU 0"):
        workshop.instance("instance_group { kind: KIND_GPU gpus: [3] }")
