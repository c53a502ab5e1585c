"""Model control by Triton's contract: modes, loads, unloads, overrides, states and texts."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import (
    InternalError,
    InvalidRequest,
    ModelConfigError,
    NotFound,
    SettingsError,
    Unavailable,
)
from edge_server.model_config.config import Completion
from edge_server.repository.control import RepositoryControl
from edge_server.repository.loader import RepositoryLoader
from edge_server.repository.source import Repositories
from edge_server.requests import InferRequest
from edge_server.serving.data_plane import DataPlane
from edge_server.serving.registry import ModelRegistry
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge_server.serving.control import ModelControl
    from tests.unit.conftest import WriteModel
    from tests.unit.repository.conftest import CountedBackend, Gate

PATIENCE_S = 30.0

IO = 'input {{ name: "a" data_type: {0} dims: -1 }} output {{ name: "b" data_type: {0} dims: -1 }} '
COUNTED = 'backend: "counted" ' + IO.format("TYPE_FP32")
BOTH = COUNTED + "version_policy { all {} }"


def ensemble(*members: str, tensors: str = "ab") -> str:
    """From `x` through `members`, one after the other, to `z`."""
    names = ["x", *(f"t{i}" for i in range(1, len(members))), "z"]
    steps = "".join(
        f'step {{ model_name: "{member}" model_version: -1 '
        f'input_map {{ key: "{tensors[0]}" value: "{source}" }} '
        f'output_map {{ key: "{tensors[1]}" value: "{target}" }} }} '
        for member, source, target in zip(members, names, names[1:], strict=False)
    )
    return (
        'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: -1 } '
        f'output {{ name: "z" data_type: TYPE_FP32 dims: -1 }} ensemble_scheduling {{ {steps} }}'
    )


OVERRIDE = {
    "backend": "counted",
    "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "b", "data_type": "TYPE_FP32", "dims": [-1]}],
}


class World:
    """A repository under model control, and what a client sees of it."""

    def __init__(
        self, *repositories: Path, strict: bool = True, take_down: bool = False, **options: object
    ) -> None:
        self.registry = ModelRegistry()
        self.loader = RepositoryLoader(
            self.registry, Repositories(repositories), take_down=take_down
        )
        options = {"explicit": True, **options}
        self.control = RepositoryControl(self.loader, self.registry, **options)  # type: ignore[arg-type]
        self.door = DataPlane(self.registry, strict_readiness=strict)

    def start(self) -> World:
        self.control.start()
        self.door.open()
        return self

    def states(self) -> dict[tuple[str, int], tuple[str, str]]:
        assert self.registry.wait_closed(PATIENCE_S)
        entries = self.control.index(only_ready=False)
        return {(e.name, e.version): (e.state.value, e.reason) for e in entries}

    def ask(self, name: str, version: str = "", tensor: str = "a") -> float:
        request = InferRequest(
            name, {tensor: Tensor(np.zeros(1, np.float32))}, model_version=version
        )
        (answer,) = self.door.infer(request).outputs.values()
        return float(answer.array[0])


@pytest.fixture
def world(repository: Path) -> Iterator[World]:
    made = World(repository).start()
    yield made
    made.control.close(PATIENCE_S)


READY = ("READY", "")
UNLOADED = ("UNAVAILABLE", "unloaded")
NEVER = ("", "")


def set_number(model: Path, number: float, version: int = 1) -> None:
    (model / str(version)).mkdir(exist_ok=True)
    (model / str(version) / "add").write_text(str(number))


# --- modes ---


def test_without_explicit_control_everything_loads_and_nothing_may_be_asked_for(
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


# --- load ---


def test_a_load_is_done_when_it_returns_and_does_nothing_where_no_file_has_changed(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    for _ in range(3):
        world.control.load("m")
    assert counted.loads["m"] == 1
    set_number(model, 5)
    world.control.load("m")
    assert world.ask("m") == 5
    assert world.registry.wait_closed(PATIENCE_S)
    assert [made.closed for made in counted.made] == [1, 0]


def test_an_older_file_put_in_place_is_a_change(
    world: World, write_model: WriteModel, counted: CountedBackend, tmp_path: Path
) -> None:
    model = write_model("m", COUNTED)
    (older := tmp_path / "older").write_text("7")
    set_number(model, 1)
    world.control.load("m")
    os.utime(older, ns=(1, 1))
    older.rename(model / "1" / "add")
    world.control.load("m")
    assert world.ask("m") == 7


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        (" \t", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        (
            " .. ",
            InvalidRequest,
            "invalid model name '..', model name must not contain path traversal characters",
        ),
        (
            "../m",
            InvalidRequest,
            "invalid model name '../m', model name must not contain path traversal characters",
        ),
        ("no", InternalError, "failed to load 'no', failed to poll from model repository"),
        (".git", InternalError, "failed to load '.git', failed to poll from model repository"),
        ("m\0", InternalError, "failed to load 'm\0', failed to poll from model repository"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_told_and_leaves_no_trace(
    world: World, write_model: WriteModel, name: str, error: type[Exception], text: str
) -> None:
    write_model(".git", COUNTED)
    with pytest.raises(error) as caught:
        world.control.load(name)
    assert str(caught.value) == text
    assert world.states() == {}
    assert world.door.server_ready()


def test_a_failed_load_says_why_may_be_tried_again_and_counts_for_readiness(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, -1)
    for _ in range(2):
        with pytest.raises(ModelConfigError) as caught:
            world.control.load("m")
        assert str(caught.value) == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: model 'm': "
            "unexpected SystemExit: a model that ends the process; see the log;\n"
        )
    assert counted.loads["m"] == 2
    assert world.states()["m", 1][0] == "UNAVAILABLE"
    assert not world.door.server_ready()
    with pytest.raises(NotFound, match="has no available versions"):
        world.ask("m")
    set_number(model, 1)
    world.control.load("m")
    assert world.states() == {("m", 1): READY}
    assert world.door.server_ready()


def test_a_configuration_that_cannot_be_read_is_not_polled_and_says_why(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", "no such field")
    with pytest.raises(
        InternalError,
        match=r"^failed to load 'm', failed to poll from model repository: .*config.pbtxt:1:",
    ):
        world.control.load("m")
    assert world.states()["m", 0][0] == "UNAVAILABLE"


@pytest.mark.parametrize("fault", ["file", "config"])
def test_a_reload_that_fails_leaves_what_serves_and_tells_the_reason(
    world: World, write_model: WriteModel, counted: CountedBackend, fault: str
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 3)
    world.control.load("m")
    if fault == "file":
        set_number(model, -1)
    else:
        write_model("m", "no such field")
    with pytest.raises((ModelConfigError, InternalError)):
        world.control.load("m")
    assert world.ask("m") == 3
    state, reason = world.states()["m", 1]
    assert state == "READY"
    assert ("SystemExit" if fault == "file" else "config.pbtxt:1:") in reason
    assert world.door.server_ready()
    set_number(model, 4)
    write_model("m", COUNTED)
    world.control.load("m")
    assert world.states() == {("m", 1): READY}
    assert world.ask("m") == 4


def test_versions_load_all_together_or_not_at_all(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", BOTH)
    set_number(model, 1, version=1)
    set_number(model, -1, version=2)
    with pytest.raises(ModelConfigError, match="version 2 is at UNAVAILABLE state"):
        world.control.load("m")
    states = world.states()
    assert {v: state for (_, v), (state, _) in states.items()} == {
        1: "UNAVAILABLE",
        2: "UNAVAILABLE",
    }
    assert [made.closed for made in counted.made] == [1]
    set_number(model, 2, version=2)
    world.control.load("m")
    assert (world.ask("m", "1"), world.ask("m", "2"), world.ask("m")) == (1, 2, 2)


def test_a_version_that_goes_is_unloaded_and_the_others_serve(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", BOTH)
    set_number(model, 2, version=2)
    world.control.load("m")
    shutil.rmtree(model / "1")
    world.control.load("m")
    assert world.states() == {("m", 1): UNLOADED, ("m", 2): READY}
    with pytest.raises(Unavailable, match="version 1 is not at ready state"):
        world.ask("m", "1")
    assert world.door.server_ready()


def test_a_model_in_two_repositories_is_unavailable(
    tmp_path: Path, counted: CountedBackend
) -> None:
    for directory in ("one/m", "two/m", "two/other"):
        (tmp_path / directory / "1").mkdir(parents=True)
        (tmp_path / directory / "config.pbtxt").write_text(COUNTED)
    world = World(tmp_path / "one", tmp_path / "two").start()
    twice = "model appears in two or more repositories"
    assert world.states() == {("m", 0): ("UNAVAILABLE", twice), ("other", 0): NEVER}
    with pytest.raises(InternalError, match=twice):
        world.control.load("m")
    world.control.load("other")
    assert world.ask("other") == 0


# --- at the same time ---


def test_loads_of_one_model_wait_for_each_other_and_of_others_do_not(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("slow", COUNTED)
    write_model("quick", COUNTED)
    held = gate("slow")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(world.control.load, "slow")
        assert held.reached.wait(PATIENCE_S)
        second = pool.submit(world.control.load, "slow")
        world.control.load("quick")
        assert world.ask("quick") == 0
        assert world.registry.snapshot.entries["slow", 1].state.value == "LOADING"
        assert not world.door.server_ready()
        world.control.unload("quick")
        held.open()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)
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
        assert held.reached.wait(PATIENCE_S)
        assert world.ask("m") == 0
        assert world.door.server_ready()
        held.open()
        load.result(PATIENCE_S)
    assert world.ask("m") == 1


def test_an_unload_overtakes_a_load_that_is_under_way(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("m", COUNTED)
    held = gate("m")
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(PATIENCE_S)
        world.control.unload("m")
        held.open()
        with pytest.raises(ModelConfigError, match="Newer operation has been applied"):
            load.result(PATIENCE_S)
    assert world.states() == {("m", 1): UNLOADED}
    assert [made.closed for made in counted.made] == [1]


BUILDING = "building model.plan: 45 %"


def test_what_a_first_load_is_at_is_told_until_it_ends(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    write_model("m", COUNTED)
    held = gate("m")
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(PATIENCE_S)
        counted.tell["m"]("building model.plan: 40 %")
        assert world.states() == {("m", 1): ("LOADING", "building model.plan: 40 %")}
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): ("LOADING", BUILDING)}
        held.open()
        load.result(PATIENCE_S)
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
        assert held.reached.wait(PATIENCE_S)
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): ("READY", BUILDING), ("other", 1): READY}
        assert world.ask("m") == 0
        assert world.door.server_ready()
        held.open()
        load.result(PATIENCE_S)
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
        assert held.reached.wait(PATIENCE_S)
        counted.tell["m"](BUILDING)
        held.open()
        with pytest.raises(ModelConfigError):
            load.result(PATIENCE_S)
    counted.tell["m"]("too late")
    ((state, reason),) = world.states().values()
    assert state == ("READY" if serves else "UNAVAILABLE")
    assert "a model that ends the process" in reason


def test_nothing_is_told_of_a_load_that_an_unload_has_overtaken(
    world: World, write_model: WriteModel, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    model = write_model("m", COUNTED)
    world.control.load("m")
    held = gate("m")
    set_number(model, 1)
    with ThreadPoolExecutor() as pool:
        load = pool.submit(world.control.load, "m")
        assert held.reached.wait(PATIENCE_S)
        counted.tell["m"](BUILDING)
        world.control.unload("m")
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): UNLOADED}
        held.open()
        with pytest.raises(ModelConfigError, match="Newer operation has been applied"):
            load.result(PATIENCE_S)
    assert world.states() == {("m", 1): UNLOADED}


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
        assert held.reached.wait(PATIENCE_S)
        counted.tell["m"](BUILDING)
        assert world.states() == {("m", 1): UNLOADED, ("m", 2): ("READY", BUILDING)}
        held.open()
        load.result(PATIENCE_S)


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
            assert held.reached.wait(PATIENCE_S)
        for held in gates:
            held.open()
        load.result(PATIENCE_S)
    assert world.ask("e", tensor="x") == 0


# --- unload ---


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
def test_members_that_nobody_asked_for_go_only_if_that_is_said(
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


# --- ensembles ---


def test_a_member_that_would_break_an_ensemble_is_refused_and_both_serve_on(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    world.control.load("e")
    write_model("m", 'backend: "counted" ' + IO.format("TYPE_INT32"))
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
    set_number(write_model("m", COUNTED.replace('"b"', '"c"')), 4)
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
    write_model("m", COUNTED.replace('"a"', '"c"'))
    with pytest.raises(ModelConfigError, match="would no longer fit"):
        world.control.load("m")


@pytest.fixture
def yielding(repository: Path) -> Iterator[World]:
    """Where ensembles give way to members that they do not fit."""
    made = World(repository, take_down=True).start()
    yield made
    made.control.close(PATIENCE_S)


INT32 = 'backend: "counted" ' + IO.format("TYPE_INT32")


def test_where_it_is_asked_for_the_ensemble_goes_till_its_members_fit_again(
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
    model = write_model("m", COUNTED)
    set_number(model, 3)
    yielding.control.load("m")
    assert yielding.ask("outer", tensor="x") == 3
    assert set(yielding.states().values()) == {READY}


def test_an_ensemble_whose_version_of_a_member_goes_says_which(
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
    write_model("e", ensemble("m").replace("TYPE_FP32", "TYPE_INT32"))
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
    write_model("m", COUNTED)
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


def test_an_ensemble_and_its_member_change_together(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    write_model("m", COUNTED)
    world.control.load("e")
    write_model("e", ensemble("m", tensors="cb"))
    write_model("m", COUNTED.replace('"a"', '"c"'))
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


def test_an_ensemble_whose_member_cannot_be_loaded_tells_of_both(
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


# --- overrides ---


def test_a_configuration_of_the_clients_serves_until_the_next_plain_load(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 2, version=2)
    override = {**OVERRIDE, "version_policy": {"specific": {"versions": [1]}}}
    for _ in range(2):
        world.control.load("m", config=json.dumps(override))
        assert world.registry.snapshot.ready_versions("m") == [1]
    assert counted.loads["m"] == 2
    world.control.load("m")
    assert world.registry.snapshot.ready_versions("m") == [2]


def test_files_of_the_clients_stand_for_the_whole_directory_as_long_as_they_serve(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 1)
    world.control.load("m", config=json.dumps(OVERRIDE), files={"7/add": b"5"})
    assert world.registry.snapshot.ready_versions("m") == [7]
    assert world.ask("m") == 5
    (root,) = roots(world)
    lease = world.registry.lease()
    world.control.load("m")
    assert world.ask("m") == 1
    assert list(root.iterdir())
    lease.release()
    assert world.registry.wait_closed(PATIENCE_S)
    assert not list(root.iterdir())
    world.control.load("new", config=json.dumps(OVERRIDE), files={"1/add": b"3"})
    assert world.ask("new") == 3
    world.control.close(PATIENCE_S)
    assert not root.exists()


def test_an_ensemble_leaves_an_overridden_member_as_it_is(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    world.control.load("m", config=json.dumps(OVERRIDE), files={"1/add": b"5"})
    world.control.load("e")
    assert world.ask("e", tensor="x") == 5


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        (
            None,
            {"1/add": b""},
            "^Load parameter 'config' must be specified for model file override$",
        ),
        ("{", {}, "^Invalid config override: "),
        ('{"no_such_field": 1}', {}, "^Invalid config override: "),
        (
            json.dumps(OVERRIDE),
            {"../x": b""},
            r"^Invalid file parameter 'file:../x' with normalized path '../x' must stay within "
            r"model directory\.$",
        ),
        (
            json.dumps({**OVERRIDE, "name": "n"}),
            {},
            "config override: unexpected directory name 'm' for model 'n'",
        ),
    ],
)
@pytest.mark.usefixtures("counted")
def test_an_override_that_is_wrong_is_told_and_what_serves_stays(
    world: World,
    write_model: WriteModel,
    config: str | None,
    files: dict[str, bytes],
    says: str,
) -> None:
    set_number(write_model("m", COUNTED), 2)
    world.control.load("m")
    with pytest.raises((InvalidRequest, ModelConfigError, InternalError), match=says):
        world.control.load("m", config=config, files=files)
    assert world.ask("m") == 2


@pytest.mark.usefixtures("counted")
def test_of_a_configuration_that_is_wrong_little_is_kept(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    with pytest.raises((ModelConfigError, InternalError)):
        world.control.load("m", config=json.dumps({"backend": "x" * 100_000}))
    (entry,) = world.control.index(only_ready=False)
    assert 0 < len(entry.reason) <= 4000


def test_a_failed_load_leaves_none_of_the_clients_files(
    world: World, counted: CountedBackend
) -> None:
    with pytest.raises(ModelConfigError, match="load failed for model 'm'"):
        world.control.load("m", config=json.dumps(OVERRIDE), files={"1/add": b"-1"})
    (root,) = roots(world)
    assert not list(root.iterdir())


def test_without_completion_a_configuration_says_it_all(
    repository: Path, write_onnx: Callable[..., None]
) -> None:
    write_onnx(repository / "m" / "1" / "model.onnx")
    registry = ModelRegistry()
    loader = RepositoryLoader(
        registry, Repositories([repository]), completion=Completion(auto=False)
    )
    (failed,) = loader.load_all()
    assert "must specify" in failed.reason or "missing or empty" in failed.reason
    dims = "data_type: TYPE_FP32 dims: [ 1, 4 ] }"
    (repository / "m" / "config.pbtxt").write_text(
        f'backend: "onnxruntime" input {{ name: "x" {dims} output {{ name: "y" {dims}'
    )
    assert loader.load("m") == {}


# --- the end ---


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
        assert held.reached.wait(PATIENCE_S)
        world.control.close(0.0)
        with pytest.raises(Unavailable, match="Server exiting"):
            world.control.load("m")
        held.open()
        with pytest.raises(ModelConfigError, match="Newer operation"):
            load.result(PATIENCE_S)
    assert world.states() == {("m", 0): NEVER, ("slow", 0): NEVER}
    assert [made.closed for made in counted.made] == [1, 1]


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
            each.result(PATIENCE_S)
    world.control.close(PATIENCE_S)
    assert world.registry.wait_closed(PATIENCE_S)
    assert [made.closed for made in counted.made] == [1] * len(counted.made)


def roots(world: World) -> list[Path]:
    root = world.control._staging._root
    return [] if root is None else [root]
