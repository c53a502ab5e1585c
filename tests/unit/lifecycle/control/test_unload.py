"""An unload: over with the last request, with the ensembles, and with members if asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import (
    COUNTED,
    NEVER,
    READY,
    UNLOADED,
    World,
    ensemble,
    set_number,
)

from edge_server.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel


def test_a_model_is_unloading_until_the_last_request_on_it_ends(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    lease = world.registry.lease()
    world.control.unload("m")
    (entry,) = world.control.index(only_ready=False)
    assert (entry.state.value, entry.reason) == ("UNLOADING", "")
    assert world.door.server_ready()
    with pytest.raises(NotFound, match="has no available versions"):
        world.ask("m")
    with pytest.raises(Unavailable, match="version 1 is not at ready state"):
        world.ask("m", "1")
    assert lease.snapshot.find("m").model is counted.made[0]
    assert counted.made[0].closed == 0
    lease.release()
    assert world.states() == {("m", 1): UNLOADED}
    assert counted.made[0].closed == 1
    assert world.door.server_ready()
    world.control.load("m")
    assert world.states() == {("m", 1): READY}


def test_unloading_what_nobody_knows_is_no_error(world: World) -> None:
    for name in ("nowhere", "", "../m"):
        world.control.unload(name)
    assert world.states() == {}


def test_an_ensemble_goes_with_its_member_and_comes_back_with_it(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    write_model("other", COUNTED)
    world.control.load("e")
    world.control.unload("m")
    assert world.states() == {("e", 1): UNLOADED, ("m", 1): UNLOADED, ("other", 0): NEVER}
    assert world.door.server_ready()
    world.control.load("other")
    assert world.states() == {("e", 1): UNLOADED, ("m", 1): UNLOADED, ("other", 1): READY}
    world.control.load("m")
    assert world.ask("e", tensor="x") == 0


def test_an_ensemble_that_was_unloaded_does_not_come_back_with_its_member(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    model = write_model("m", COUNTED)
    world.control.load("e")
    world.control.unload("e")
    set_number(model, 1)
    world.control.load("m")
    assert world.states() == {("e", 1): UNLOADED, ("m", 1): READY}


@pytest.mark.parametrize(
    ("unload_dependents", "gone"), [(False, {"e"}), (True, {"e", "only_for_e"})]
)
def test_members_that_nobody_requested_go_only_on_request(
    world: World,
    write_model: WriteModel,
    counted: CountedBackend,
    unload_dependents: bool,
    gone: set[str],
) -> None:
    write_model("e", ensemble("only_for_e", "by_name", "shared"))
    write_model("f", ensemble("shared"))
    for name in ("only_for_e", "by_name", "shared"):
        write_model(name, COUNTED)
    for name in ("e", "f", "by_name"):
        world.control.load(name)
    world.control.unload("e", unload_dependents=unload_dependents)
    assert {name for (name, _), state in world.states().items() if state == UNLOADED} == gone
