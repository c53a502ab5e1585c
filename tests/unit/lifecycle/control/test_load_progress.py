"""What a load that is under way tells the index, beside what serves."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import (
    BOTH,
    COUNTED,
    READY,
    TIMEOUT_S,
    UNLOADED,
    World,
    set_number,
)

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.counted_backend import CountedBackend, Gate
    from support.model_folders import WriteModel

BUILDING = "building model.plan: 45 %"


def test_what_a_first_load_is_at_is_reported_until_it_ends(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("m", COUNTED)
    held = gate("m")
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(TIMEOUT_S)
        counted.tell["m"]("building model.plan: 40 %")
        assert world.states() == {("m", 1): ("LOADING", "building model.plan: 40 %")}
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): ("LOADING", BUILDING)}
        held.open()
        load.result(TIMEOUT_S)
    assert world.states() == {("m", 1): READY}
    counted.tell["m"]("too late")
    assert world.states() == {("m", 1): READY}


def test_what_a_load_is_at_stands_beside_the_version_that_serves(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("other", COUNTED)
    world.control.load("other")
    model = write_model("m", COUNTED)
    world.control.load("m")
    held = gate("m")
    set_number(model, 1)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(TIMEOUT_S)
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): ("READY", BUILDING), ("other", 1): READY}
        assert world.ask("m") == 0
        assert world.door.server_ready()
        held.open()
        load.result(TIMEOUT_S)
    assert world.ask("m") == 1
    assert world.states() == {("m", 1): READY, ("other", 1): READY}


@pytest.mark.parametrize("serves", [False, True])
def test_why_a_load_failed_takes_the_place_of_what_it_was_at(
    serves: bool,
    world: World,
    write_model: WriteModel,
    counted: CountedBackend,
    gate: Callable[[str], Gate],
) -> None:
    model = write_model("m", COUNTED)
    if serves:
        world.control.load("m")
    held = gate("m")
    set_number(model, -1)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(TIMEOUT_S)
        counted.tell["m"](BUILDING)
        held.open()
        with pytest.raises(ModelConfigError):
            load.result(TIMEOUT_S)
    counted.tell["m"]("too late")
    ((state, reason),) = world.states().values()
    assert state == ("READY" if serves else "UNAVAILABLE")
    assert "a model that ends the process" in reason


def test_nothing_is_reported_of_a_load_that_an_unload_has_overtaken(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    model = write_model("m", COUNTED)
    world.control.load("m")
    held = gate("m")
    set_number(model, 1)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(TIMEOUT_S)
        counted.tell["m"](BUILDING)
        world.control.unload("m")
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): UNLOADED}
        held.open()
        # The load has not failed: it comes first, and then the unload.
        load.result(TIMEOUT_S)
    assert world.states() == {("m", 1): UNLOADED}
    world.control.load("m")
    assert world.states() == {("m", 1): READY}


def test_what_a_load_is_at_leaves_versions_alone_that_are_gone(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    model = write_model("m", BOTH)
    set_number(model, 2, version=2)
    world.control.load("m")
    shutil.rmtree(model / "1")
    world.control.load("m")
    assert world.states() == {("m", 1): UNLOADED, ("m", 2): READY}
    held = gate("m")
    set_number(model, 3, version=2)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(TIMEOUT_S)
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): UNLOADED, ("m", 2): ("READY", BUILDING)}
        held.open()
        load.result(TIMEOUT_S)
