"""The simulated TensorRT offers what the real classes do, and has no more than a version has."""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
from support.simulated_gpu import SIMULATED_GPU
from support.tensorrt_api import real_bindings

if TYPE_CHECKING:
    from support.workshop import Workshop

RECORD = json.loads((SIMULATED_GPU / "tensorrt_interface.json").read_text())
NAMES: dict[str, Any] = real_bindings.names()
VERSIONS = {
    "8.6": "8.6.1.6",
    "10.3": "10.3.0.30",
    "10.16": "10.16.2.1",
    "11.4": "11.4.1.1",
}


@pytest.fixture
def interface(workshop: Workshop) -> Any:
    spec = importlib.util.spec_from_file_location(
        "tensorrt_interface", SIMULATED_GPU / "tensorrt_interface.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_member_that_is_simulated_is_in_some_real_version(interface: Any) -> None:
    for name in interface.CLASSES:
        everywhere = set().union(*(classes.get(name, {}) for classes in NAMES.values()))
        assert set(interface.offered(name)) - everywhere == set()


@pytest.mark.parametrize("version", RECORD)
def test_parameters_are_those_of_the_real_methods(interface: Any, version: str) -> None:
    compared = 0
    for name in interface.CLASSES:
        for member, parameters in interface.offered(name).items():
            forms = RECORD[version].get(f"{name}.{member}", "not there")
            if forms == "not there":
                assert member not in NAMES[version].get(name, {})
                continue
            assert (parameters is None) is (forms is None), member
            if forms:
                # What the simulation leaves out at the end, the real one has a default for.
                assert any(form[: len(parameters)] == parameters for form in forms), member
                compared += 1
    assert compared > 15


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_only_what_the_real_one_has(workshop: Workshop, version: str) -> None:
    workshop.tensorrt(f"version={VERSIONS[version]}")
    trt = importlib.import_module("tensorrt")
    assert trt.__version__ == VERSIONS[version]
    for name in ("DataType", "TensorFormat", "IOutputAllocator", "OnnxParserFlag"):
        assert hasattr(trt, name) is (name in NAMES[version][""] and name != "OnnxParserFlag")
    workshop.write()
    engine: Any = workshop.instance().engine._engine
    for name in ("get_tensor_shape", "get_tensor_profile_values"):
        assert hasattr(engine, name) is (name in NAMES[version]["ICudaEngine"])


def test_a_context_is_for_one_thread_at_a_time_and_wants_aligned_addresses(
    workshop: Workshop,
) -> None:
    workshop.write()
    context: Any = workshop.instance()._context._context
    assert context.set_tensor_address("x", 512)
    assert not context.set_tensor_address("x", 520)
    with context._alone(), pytest.raises(AssertionError, match="two threads"):
        context.set_tensor_address("x", 512)
