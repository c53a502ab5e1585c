"""Loads, unloads, requests and the end, while others are under way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import (
    COUNTED,
    NEVER,
    TIMEOUT_S,
    World,
    ensemble,
    set_number,
)

from edge_server.errors import ModelConfigError, NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.counted_backend import CountedBackend, Gate
    from support.model_folders import WriteModel


def test_loads_of_one_model_wait_for_each_other_and_of_others_do_not(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("slow", COUNTED)
    write_model("quick", COUNTED)
    held = gate("slow")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(world.control.load, "slow")
        assert held.reached.wait(TIMEOUT_S)
        second = pool.submit(world.control.load, "slow")
        world.control.load("quick")
        assert world.ask("quick") == 0
        assert world.registry.snapshot.entries["slow", 1].state.value == "LOADING"
        assert not world.door.server_ready()
        world.control.unload("quick")
        held.open()
        first.result(TIMEOUT_S)
        second.result(TIMEOUT_S)
    assert counted.loads["slow"] == 1


def test_a_reload_in_the_background_serves_on_and_stays_ready(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    model = write_model("m", COUNTED)
    world.control.load("m")
    held = gate("m")
    set_number(model, 1)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(TIMEOUT_S)
        assert world.ask("m") == 0
        assert world.door.server_ready()
        held.open()
        load.result(TIMEOUT_S)
    assert world.ask("m") == 1


def test_members_load_at_the_same_time(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("one", COUNTED)
    write_model("two", COUNTED)
    write_model("e", ensemble("one", "two"))
    gates = [gate("one"), gate("two")]
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "e")
        for held in gates:
            assert held.reached.wait(TIMEOUT_S)
        for held in gates:
            held.open()
        load.result(TIMEOUT_S)
    assert world.ask("e", tensor="x") == 0


def test_requests_meet_an_open_model_whatever_is_loaded_and_unloaded_meanwhile(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    world.control.load("m")
    stop = threading.Event()

    def ask() -> int:
        answered = 0
        while not stop.is_set():
            try:
                assert world.ask("m") in range(20)
                answered += 1
            except NotFound:
                continue
        return answered

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for number in range(20):
                set_number(model, number)
                world.control.load("m")
                if number % 5 == 4:
                    world.control.unload("m")
        finally:
            stop.set()
        for each in asking:
            each.result(TIMEOUT_S)
    world.control.close(TIMEOUT_S)
    assert world.registry.wait_closed(TIMEOUT_S)
    assert [made.closed for made in counted.made] == [1] * len(counted.made)


def test_nothing_is_loaded_any_more_once_it_is_closed_and_what_was_is_closed(
    repository: Path, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("m", COUNTED)
    write_model("slow", COUNTED)
    world = World(repository).start()
    world.control.load("m")
    held = gate("slow")
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "slow")
        assert held.reached.wait(TIMEOUT_S)
        world.control.close(0.0)
        with pytest.raises(Unavailable, match="Server exiting"):
            world.control.load("m")
        held.open()
        with pytest.raises(ModelConfigError, match="Newer operation"):
            load.result(TIMEOUT_S)
    assert world.states() == {("m", 0): NEVER, ("slow", 0): NEVER}
    assert [made.closed for made in counted.made] == [1, 1]
