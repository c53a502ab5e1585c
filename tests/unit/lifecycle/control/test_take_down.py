"""Where it is asked for, an ensemble gives way to a member that it does not fit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from unit.lifecycle.control.world import (
    COUNTED,
    INT32,
    KNOWN,
    MAY_BREAK,
    READY,
    TIMEOUT_S,
    UNLOADED,
    World,
    ensemble,
    set_number,
)

from edge_server.errors import ModelConfigError, NotFound
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel


@pytest.fixture
def yielding(repository: Path) -> Iterator[World]:
    """Where ensembles give way to members that they do not fit."""
    made = World(repository, take_down=True).start()
    yield made
    made.control.close(TIMEOUT_S)


def test_where_it_is_configured_the_ensemble_goes_till_its_members_fit_again(
    yielding: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("outer", ensemble("e", tensors="xz"))
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    yielding.control.load("outer")
    write_model("m", INT32)
    yielding.control.load("m")
    states = yielding.states()
    assert states["m", 1] == READY
    state, of_e = states["e", 1]
    assert state == "UNAVAILABLE"
    assert of_e.endswith(
        "in ensemble e, ensemble tensor z: inconsistent data type: TYPE_FP32 is inferred from "
        "model e while TYPE_INT32 is inferred from model m"
    )
    state, of_outer = states["outer", 1]
    assert state == "UNAVAILABLE"
    assert of_outer.endswith(
        "ensemble 'outer' depends on 'e' which has no loaded version. Model 'e' loading failed "
        f"with error: {of_e}"
    )
    with pytest.raises(NotFound, match="'outer' has no available versions"):
        yielding.ask("outer", tensor="x")
    assert not yielding.door.server_ready()
    model = write_model("m", KNOWN)
    set_number(model, 3)
    yielding.control.load("m")
    assert yielding.ask("outer", tensor="x") == 3
    assert set(yielding.states().values()) == {READY}


def test_an_ensemble_whose_version_of_a_member_goes_names_it(
    yielding: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m").replace("model_version: -1", "model_version: 1"))
    model = write_model("m", COUNTED)
    yielding.control.load("e")
    set_number(model, 2, version=2)
    yielding.control.load("m")
    text = "ensemble 'e' depends on 'm' whose required version 1 is not loaded."
    assert yielding.states()["e", 1][1].endswith(text)
    shutil.rmtree(model / "2")
    yielding.control.load("m")
    assert yielding.ask("e", tensor="x") == 0


def test_an_ensemble_that_was_taken_down_comes_with_a_configuration_that_fits(
    yielding: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    yielding.control.load("e")
    write_model("e", ensemble("m", tensors="cb"))  # fits neither
    write_model("m", INT32)
    with pytest.raises(ModelConfigError, match="mapping to non-existing input c"):
        yielding.control.load("e")
    states = yielding.states()
    assert (states["m", 1], states["e", 1][0]) == (READY, "UNAVAILABLE")
    write_model("e", ensemble("m").replace("TYPE_FP32", "TYPE_INT32") + MAY_BREAK)
    yielding.control.load("e")
    assert set(yielding.states().values()) == {READY}


def test_an_ensemble_that_was_taken_down_and_then_unloaded_stays_away(
    yielding: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    yielding.control.load("e")
    write_model("m", INT32)
    yielding.control.load("m")
    yielding.control.unload("e")
    write_model("m", KNOWN)
    yielding.control.load("m")
    assert yielding.states() == {("e", 1): UNLOADED, ("m", 1): READY}


def test_what_runs_in_an_ensemble_that_is_taken_down_finishes(
    yielding: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    set_number(write_model("m", COUNTED), 7)
    yielding.control.load("e")
    lease = yielding.registry.lease()
    write_model("m", INT32)
    yielding.control.load("m")
    request = InferRequest("e", {"x": Tensor(np.zeros(1, np.float32))})
    assert lease.snapshot.infer(request).outputs["z"].array[0] == 7
    lease.release()
