"""What each mode loads at the start, and what may be asked for in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import COUNTED, NEVER, READY, World, ensemble

from edge_server.errors import InternalError, ModelConfigError, SettingsError, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel

    from edge_server.inference.data_plane import ModelControl


def test_without_explicit_control_everything_loads_and_nothing_may_be_requested(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("m", COUNTED)
    world = World(repository, explicit=False).start()
    assert world.ask("m") == 0
    text = "^explicit model load / unload is not allowed if polling is enabled$"
    with pytest.raises(Unavailable, match=text):
        world.control.load("m")
    with pytest.raises(Unavailable, match=text):
        world.control.unload("m")
    assert world.states() == {("m", 1): READY}


def test_a_control_is_a_model_control(world: World) -> None:
    control: ModelControl = world.control
    assert control.index(only_ready=False) == []


@pytest.mark.parametrize("explicit", [False, True])
def test_a_model_that_fails_at_the_start_ends_it_or_leaves_it_unready(
    repository: Path, write_model: WriteModel, counted: CountedBackend, explicit: bool
) -> None:
    write_model("m", COUNTED)
    write_model("broken", "no such field")
    with pytest.raises(ModelConfigError, match=r"^models that cannot be loaded: broken$"):
        World(repository, explicit=explicit, load=["*"]).start()
    world = World(repository, explicit=explicit, load=["*"], exit_on_error=False).start()
    assert world.ask("m") == 0
    assert not world.door.server_ready()
    lenient = World(repository, strict=False, explicit=False, exit_on_error=False).start()
    assert lenient.door.server_ready()


@pytest.mark.parametrize("strict", [True, False])
def test_a_repository_that_cannot_be_read_ends_the_start_or_leaves_a_server_that_is_not_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(ModelConfigError, match="absent"):
        World(absent, explicit=False).start()
    world = World(absent, strict=strict, explicit=False, exit_on_error=False).start()
    assert world.states() == {}
    assert "no model is loaded" in caplog.text
    assert (world.door.server_live(), world.door.server_ready()) == (False, False)


def test_a_repository_that_comes_later_makes_the_server_live_with_its_first_model(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    absent = repository.rename(repository.with_name("absent"))
    world = World(repository, load=["*"], exit_on_error=False).start()
    assert not world.door.server_live()
    absent.rename(repository)
    write_model("m", COUNTED)
    with pytest.raises(InternalError):
        world.control.load("n")
    assert not world.door.server_live()
    world.control.load("m")
    assert (world.door.server_live(), world.door.server_ready()) == (True, True)
    # Its end would have a watchdog end the server in the midst of an update.
    world.control.unload("m")
    assert (world.door.server_live(), world.door.server_ready()) == (True, True)


def test_explicit_loads_what_is_named_with_its_members_and_counts_nothing_else(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    write_model("other", COUNTED)
    write_model("broken", "no such field")
    world = World(repository, load=["e"]).start()
    assert world.states() == {
        ("broken", 0): NEVER,
        ("e", 1): READY,
        ("m", 1): READY,
        ("other", 0): NEVER,
    }
    assert world.door.server_ready()
    assert {e.name for e in world.control.index(only_ready=True)} == {"e", "m"}


def test_a_startup_model_that_is_not_there_is_an_error_and_the_star_stands_alone(
    repository: Path,
) -> None:
    with pytest.raises(ModelConfigError, match="cannot be loaded: nowhere"):
        World(repository, load=["nowhere"]).start()
    with pytest.raises(SettingsError, match="must be the ONLY startup model"):
        World(repository, load=["*", "m"])
