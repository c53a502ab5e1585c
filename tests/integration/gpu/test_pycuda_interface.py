"""The simulated pycuda has no name, parameter or value that the real one has not.

As all that edge_server.gpu does runs on the simulation, it asks the real one for nothing that is
not there. The record is made by the real one: tests/simulated_gpu/pycuda_interface.py.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
from support.simulated_gpu import SIMULATED_GPU

if TYPE_CHECKING:
    from types import ModuleType

    from support.simulated_gpu import SimulatedGpu

RECORD = json.loads((SIMULATED_GPU / "pycuda_interface.json").read_text())


@pytest.fixture
def interface() -> ModuleType:
    path = SIMULATED_GPU / "pycuda_interface.py"
    spec = importlib.util.spec_from_file_location("pycuda_interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fits(simulated: Any, real: Any) -> bool:
    """Whether what is right for the simulation is right for the real one."""
    if isinstance(simulated, dict) and "parameters" in simulated and "parameters" in real:
        ours, theirs = simulated["parameters"], real["parameters"]
        if theirs[-1:] == ["**kwargs"]:
            # What else it takes shows in its source only: `shared_size`.
            theirs = [*theirs[:-1], *ours[len(theirs) - 1 :]]
        return ours == theirs
    return simulated == real


def test_all_that_the_simulation_has_the_real_one_has(
    simulated_libcuda: SimulatedGpu, interface: ModuleType
) -> None:
    driver = interface.simulated_driver()
    names = interface.names_of(driver)
    assert names == sorted(RECORD["names"])
    wrong = [n for n in names if not fits(interface.described(driver, n), RECORD["names"][n])]
    assert wrong == []


def test_a_wrong_simulation_would_be_seen() -> None:
    real = RECORD["names"]["memcpy_htod_async"]
    assert fits({"parameters": ["dest", "src", "stream?"]}, real)
    for wrong in (["dest", "src", "stream"], ["dest", "src"], ["src", "dest", "stream?"]):
        assert not fits({"parameters": wrong}, real)
    assert not fits(1, RECORD["names"]["event_flags.DISABLE_TIMING"])
    assert not fits({"bases": ["Exception"]}, RECORD["names"]["MemoryError"])


@pytest.mark.skipif(not importlib.util.find_spec("pycuda"), reason="pycuda is not installed")
def test_the_record_is_that_of_the_pycuda_that_is_here(
    simulated_libcuda: SimulatedGpu, interface: ModuleType
) -> None:
    import pycuda
    import pycuda.driver

    if RECORD["version"] != pycuda.VERSION_TEXT:
        pytest.skip(f"pycuda {pycuda.VERSION_TEXT} is here, the record is of {RECORD['version']}")
    real = {name: interface.described(pycuda.driver, name) for name in RECORD["names"]}
    assert real == RECORD["names"]
