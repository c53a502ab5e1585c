"""Ensembles fit their members at any moment: who is refused, who waits, who comes along."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import (
    COUNTED,
    INT32,
    KNOWN,
    READY,
    World,
    ensemble,
    set_number,
)

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel


def test_a_member_that_would_break_an_ensemble_is_refused_and_both_serve_on(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    world.control.load("e")
    write_model("m", INT32)
    with pytest.raises(ModelConfigError) as caught:
        world.control.load("m")
    assert "ensemble 'e', which serves, uses model 'm' and would no longer fit" in str(caught.value)
    assert "inconsistent data type" in str(caught.value)
    assert world.ask("e", tensor="x") == 0
    assert [made.closed for made in counted.made] == [0, 1]


def test_an_ensemble_that_fits_no_member_yet_comes_with_one_that_it_fits(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    world.control.load("e")
    write_model("e", ensemble("m", tensors="ac"))
    with pytest.raises(ModelConfigError, match="mapped from non-existing output c"):
        world.control.load("e")
    # A member that it does not fit either leaves it waiting, and the index says so on.
    set_number(write_model("m", COUNTED), 3)
    world.control.load("m")
    assert world.ask("e", tensor="x") == 3
    assert "mapped from non-existing output c" in world.states()["e", 1][1]
    set_number(write_model("m", KNOWN.replace('"b"', '"c"')), 4)
    world.control.load("m")
    assert world.ask("e", tensor="x") == 4
    assert world.states() == {("e", 1): READY, ("m", 1): READY}


def test_an_ensemble_that_is_as_it_was_again_waits_for_nothing(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    path = write_model("e", ensemble("m")) / "config.pbtxt"
    write_model("m", COUNTED)
    world.control.load("e")
    before = path.read_text(), path.stat()
    write_model("e", ensemble("m", tensors="cb"))
    with pytest.raises(ModelConfigError):
        world.control.load("e")
    path.write_text(before[0])
    os.utime(path, ns=(before[1].st_atime_ns, before[1].st_mtime_ns))
    world.control.load("e")
    assert world.states()["e", 1] == READY
    write_model("m", KNOWN.replace('"a"', '"c"'))
    with pytest.raises(ModelConfigError, match="would no longer fit"):
        world.control.load("m")


def test_an_ensemble_and_its_member_change_together(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    world.control.load("e")
    write_model("e", ensemble("m", tensors="cb"))
    write_model("m", KNOWN.replace('"a"', '"c"'))
    world.control.load("e")
    snapshot = world.registry.snapshot
    assert snapshot.find("e").config.steps[0].input_map == {"c": "x"}
    assert snapshot.find("m").config.inputs[0].name == "c"


def test_an_ensemble_is_made_anew_with_its_member_and_keeps_what_fits(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("outer", ensemble("e", tensors="xz"))
    write_model("e", ensemble("m"))
    model = write_model("m", COUNTED)
    world.control.load("outer")
    before = world.registry.snapshot.find("outer")
    set_number(model, 3)
    write_model("e", ensemble("m", tensors="cb"))  # does not fit
    with pytest.raises(ModelConfigError, match="load failed for model 'e'"):
        world.control.load("e")
    assert world.ask("outer", tensor="x") == 3
    assert world.registry.snapshot.find("outer") is not before
    state, reason = world.states()["e", 1]
    assert state == "READY"
    assert "mapping to non-existing input c" in reason


def test_an_ensemble_that_waits_for_a_broken_member_comes_with_its_repair(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("outer", ensemble("e", tensors="xz"))
    write_model("e", ensemble("m"))
    model = write_model("m", COUNTED)
    set_number(model, -1)
    world = World(repository, explicit=True, load=["*"], exit_on_error=False).start()
    assert {state for state, _ in world.states().values()} == {"UNAVAILABLE"}
    set_number(model, 6)
    world.control.load("m")
    assert world.ask("outer", tensor="x") == 6
    assert world.door.server_ready()


def test_an_ensemble_whose_member_cannot_be_loaded_reports_both(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    set_number(write_model("m", COUNTED), -1)
    with pytest.raises(ModelConfigError) as caught:
        world.control.load("e")
    of_ensemble, of_member = str(caught.value).splitlines()
    assert of_ensemble.startswith("load failed for model 'e': version 1 is at UNAVAILABLE state: ")
    assert "ensemble 'e' depends on 'm' which has no loaded version" in of_ensemble
    assert of_member.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: ")
