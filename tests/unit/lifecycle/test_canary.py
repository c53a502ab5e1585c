"""A version that fails in its canary gives way to the one before it, which is still open."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.waiting import wait_until

from edge_server.errors import InternalError, NotFound
from edge_server.inference.canary_monitor import CanaryTerms, WatchedScheduler
from edge_server.inference.registry import ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend, Gate
    from support.model_folders import WriteModel

    from edge_server.inference.canary_monitor import CanaryMonitor
    from edge_server.inference.registry import LoadedModel
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.model_config.config import ModelConfig

TIMEOUT_S = 30.0
BETTER = "its predecessor, given 3 of these requests, responded well to 3"
NAN = float("nan")
# Passes only where a test lets it.
ENDLESS = CanaryTerms(requests=10**9, least_s=1e9, longest_s=1e9)
# Callers know of every change.
MAY_BREAK = 'parameters { key: "allow_interface_change" value { string_value: "true" } } '
CONFIG = (
    MAY_BREAK.replace("{", "{{").replace("}", "}}")
    + 'backend: "counted" input {{ name: "a" data_type: TYPE_FP32 dims: {0} }} '
    'output {{ name: "b" data_type: TYPE_FP32 dims: {0} }} {1}'
)
ALL = "version_policy { all {} }"
ENSEMBLE = (
    MAY_BREAK.replace("{", "{{").replace("}", "}}")
    + 'platform: "ensemble" input {{ name: "x" data_type: TYPE_FP32 dims: {0} }} '
    'output {{ name: "y" data_type: TYPE_FP32 dims: {0} }} '
    'ensemble_scheduling {{ step {{ model_name: "m" model_version: -1 '
    'input_map {{ key: "a" value: "x" }} output_map {{ key: "b" value: "y" }} }} }}'
)


class HeardTable(ModelTable):
    """A table that hears of rollbacks."""

    def __init__(self) -> None:
        super().__init__(ModelRegistry())
        self.went_back: list[tuple[ModelSpec, str]] = []
        self.back = threading.Event()

    def quarantine(self, model_spec: ModelSpec, reason: str, *, only_this: bool) -> None:
        del only_this
        self.went_back.append((model_spec, reason))

    def commit(self) -> None:
        if self.went_back:
            self.back.set()


class World:
    """A repository whose new versions are in its canary."""

    def __init__(
        self,
        repository: Path,
        write_model: WriteModel,
        counted: CountedBackend,
        terms: CanaryTerms = ENDLESS,
        *,
        take_down: bool = False,
    ) -> None:
        self.repository = repository
        self.write_model = write_model
        self.counted = counted
        self.table = HeardTable()
        self.registry = self.table.registry
        self.went_back, self.back = self.table.went_back, self.table.back
        self.loader = RepositoryLoader(
            ModelLifecycle(self.table, terms=terms, take_down=take_down),
            Repositories([repository]),
        )

    def on_trial(self, name: str) -> bool:
        return self.table.get(name).canary is not None

    def monitor(self, name: str) -> CanaryMonitor:
        run = self.table.get(name).canary
        assert run is not None
        return run.monitor

    def load(
        self, add: float, version: int = 1, *, dims: str = "1", extra: str = "", name: str = "m"
    ) -> None:
        directory = self.write_model("m", CONFIG.format(dims, extra), version)
        (directory / str(version) / "add").write_text(str(add))
        assert self.loader.load(name) == {}

    def load_ensemble(self, *members: str, name: str = "e", ends: str = "xy") -> None:
        """From `x` through `members`, one after the other, to `y`; with the ends `ab` it can be a
        member itself."""
        first, last = tuple(ends)
        tensors = [first, *(f"t{i}" for i in range(1, len(members))), last]
        steps = "".join(
            f'step {{ model_name: "{member}" model_version: -1 '
            f'input_map {{ key: "a" value: "{source}" }} '
            f'output_map {{ key: "b" value: "{target}" }} }} '
            for member, source, target in zip(members, tensors, tensors[1:], strict=False)
        )
        self.write_model(
            name,
            f'platform: "ensemble" input {{ name: "{first}" data_type: TYPE_FP32 dims: 1 }} output '
            f'{{ name: "{last}" data_type: TYPE_FP32 dims: 1 }} ensemble_scheduling {{ {steps} }}',
        )
        assert self.loader.load(name) == {}

    def load_model(self, name: str, add: float) -> None:
        directory = self.write_model(name, CONFIG.format(1, ""))
        (directory / "1" / "add").write_text(str(add))
        assert self.loader.load(name) == {}

    def ask_ensemble_until_back(self) -> None:
        for _ in range(3):
            with contextlib.suppress(InternalError):
                self.ask("e")
        assert self.back.wait(TIMEOUT_S)

    def told(self) -> list[str]:
        """The models that were rolled back, in order, each with its own draft."""
        return [model_spec.name for model_spec, _ in self.went_back]

    def ask(self, name: str = "m", version: str = "", size: int = 1, value: float = 0.0) -> float:
        given, got = ("x", "y") if name == "e" else ("a", "b")
        request = InferRequest(name, {given: Tensor(np.full(size, value, "<f4"))}, version)
        lease = self.registry.lease()
        try:
            return float(lease.snapshot.infer(request).outputs[got].array[0])
        finally:
            lease.release()

    def ask_until_back(self) -> None:
        for _ in range(3):
            self.ask()
        assert self.back.wait(TIMEOUT_S)

    def closed(self) -> list[int]:
        """How often each model that was ever made has been closed, in the end."""
        self.loader.close(TIMEOUT_S)
        assert self.registry.wait_closed(TIMEOUT_S)
        return [model.closed for model in self.counted.made]

    def state(self, name: str = "m") -> dict[int, tuple[ModelState, str]]:
        entries = self.registry.snapshot.entries.values()
        return {e.version: (e.state, e.reason) for e in entries if e.name == name}


@pytest.fixture
def world(repository: Path, write_model: WriteModel, counted: CountedBackend) -> Iterator[World]:
    made = World(repository, write_model, counted)
    yield made
    made.loader.close(TIMEOUT_S)


def test_a_version_that_responds_with_nan_gives_way_and_the_index_gives_the_reason(
    world: World,
) -> None:
    world.load(10)
    world.load(NAN)
    world.ask_until_back()
    assert world.ask() == 10
    reason = f"version 1: 3 of 3 responses were not finite; {BETTER}"
    assert world.state() == {1: (ModelState.READY, f"rolled back: {reason}")}
    ((model_spec, told),) = world.went_back
    assert (model_spec.name, told) == ("m", reason)
    # What failed is closed, and what serves is still open.
    assert world.registry.wait_closed(TIMEOUT_S)
    assert [model.closed for model in world.counted.made] == [0, 1]
    assert world.closed() == [1, 1]


def test_a_client_that_sends_what_no_version_makes_sense_of_takes_nothing_back(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    """NaN, infinity, and numbers that are finite and too large; in a model and in an ensemble."""
    world = World(repository, write_model, counted, CanaryTerms(1000, 0.0, 1e9))
    world.load_model("m", 3e38)
    world.load_ensemble("m")
    world.load_model("m", 2.9e38)
    for value in (NAN, np.inf, -np.inf, 3e38):
        for name in "me":
            for _ in range(10):
                with contextlib.suppress(InternalError):
                    assert not np.isfinite(world.ask(name, value=value))
    canary = [world.monitor(name) for name in "me"]
    wait_until(lambda: not any(trial.is_comparing for trial in canary))
    assert [trial.fault() for trial in canary] == ["", ""]
    assert world.told() == []
    assert world.closed() == [1, 1]


def test_what_is_known_of_one_that_serves_is_on_the_index(world: World) -> None:
    world.load(10)
    world.load(20)
    lifecycle, model_spec = world.loader.lifecycle, world.table.serving_spec("m")
    assert model_spec is not None
    lifecycle.report_canary(model_spec, "version 1 is slower")
    assert world.state() == {1: (ModelState.READY, "version 1 is slower")}
    lifecycle.report_canary(model_spec, "")
    assert world.state() == {1: (ModelState.READY, "")}
    world.load(30)
    lifecycle.report_canary(model_spec, "version 1 is slower")
    assert world.state() == {1: (ModelState.READY, "")}


def test_a_version_beside_others_takes_none_of_them_with_it(world: World) -> None:
    world.load(10, extra=ALL)
    world.load(NAN, 2, extra=ALL)
    assert world.ask(version="1") == 10
    world.ask_until_back()
    assert world.ask() == 10
    with pytest.raises(NotFound):
        world.ask(version="3")
    assert world.registry.wait_closed(TIMEOUT_S)
    assert world.state()[2][0] is ModelState.UNAVAILABLE
    assert world.closed() == [1, 1]


def test_what_passes_stays_and_what_was_before_it_is_closed(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    terms = CanaryTerms(requests=5, least_s=0.0, longest_s=1e9)
    world = World(repository, write_model, counted, terms)
    closed = threading.Event()
    world.load(10)
    # The registry closes it first, for its part; what the trial keeps is closed after it.
    counted.made[0].close = closed.set
    world.load(20)
    for _ in range(5):
        world.ask()
    assert closed.wait(TIMEOUT_S)
    assert world.ask() == 20
    assert world.went_back == []
    world.loader.close(TIMEOUT_S)


def test_the_next_version_is_held_against_the_last_that_passed(world: World) -> None:
    world.load(10)
    world.load(20)
    world.load(NAN)
    assert world.registry.wait_closed(TIMEOUT_S)
    # Twenty had not passed yet; nobody needs it.
    assert [model.closed for model in world.counted.made] == [0, 1, 0]
    world.ask_until_back()
    assert world.ask() == 10
    assert world.closed() == [1, 1, 1]


def test_a_version_in_its_canary_stays_in_it_when_its_instances_change(world: World) -> None:
    world.load(10)
    world.load(NAN)
    world.write_model("m", CONFIG.format(1, "instance_group { count: 3 }"))
    assert world.loader.load("m") == {}
    assert len(world.counted.made) == 2
    world.ask_until_back()
    assert world.ask() == 10
    assert world.closed() == [1, 1]


def test_a_version_in_its_canary_that_goes_away_ends_its_canary(world: World) -> None:
    world.load(10, extra=ALL)
    world.load(20, 2, extra=ALL)
    (world.repository / "m" / "2" / "add").unlink()
    (world.repository / "m" / "2").rmdir()
    assert world.loader.load("m") == {}
    assert world.ask() == 10
    assert world.closed() == [1, 1]


def test_an_ensemble_goes_back_with_its_member(world: World) -> None:
    world.write_model("e", ENSEMBLE.format(1))
    world.load(10, name="e")
    world.load(NAN)
    ensemble = world.registry.snapshot.find("e")
    for _ in range(3):
        world.ask("e")
    assert world.back.wait(TIMEOUT_S)
    assert world.told() == ["m"]
    assert world.ask("e") == 10
    assert world.registry.snapshot.find("e") is not ensemble
    assert world.closed() == [1, 1]


def test_an_ensemble_that_changed_with_its_member_goes_back_too(world: World) -> None:
    world.write_model("e", ENSEMBLE.format(1))
    world.load(10, name="e", dims="1")
    world.write_model("e", ENSEMBLE.format(2))
    world.load(NAN, name="e", dims="2")
    for _ in range(3):
        world.ask("e", size=2)
    assert world.back.wait(TIMEOUT_S)
    assert world.registry.snapshot.find("e").config.inputs[0].shape == (1,)
    assert world.ask("e") == 10
    assert world.told() == ["m"]
    # It waits for a member that it fits.
    world.load(30, dims="2")
    assert world.ask("e", size=2) == 30


def test_an_ensemble_that_alone_changes_is_watched_and_goes_back_alone(world: World) -> None:
    world.load_model("m", 10)
    world.load_model("n", NAN)
    world.load_ensemble("m")
    world.load_ensemble("n")
    assert world.on_trial("e")
    world.ask_ensemble_until_back()
    assert world.ask("e") == 10
    ((model_spec, reason),) = world.went_back
    assert (model_spec.name, model_spec.members) == ("e", {"n"})
    assert reason == f"version 1: 3 of 3 responses were not finite; {BETTER}"
    assert world.state("e") == {1: (ModelState.READY, f"rolled back: {reason}")}
    assert not world.on_trial("e")
    assert world.closed() == [1, 1]


def test_an_ensemble_that_goes_back_leaves_no_scheduler_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LoadedModel] = []
    make = Scheduling.ensemble

    def noted(scheduling: Scheduling, config: ModelConfig, version: int) -> LoadedModel:
        made.append(make(scheduling, config, version))
        return made[-1]

    monkeypatch.setattr(Scheduling, "ensemble", noted)
    world.load_model("m", 10)
    world.load_model("n", NAN)
    world.load_ensemble("m")
    world.load_ensemble("n")
    world.ask_ensemble_until_back()
    assert world.closed() == [1, 1]
    assert len(made) == 3
    assert not any(ensemble.scheduler_uses.more() for ensemble in made)


def test_a_member_that_is_fine_by_itself_goes_back_where_its_ensemble_is_not(world: World) -> None:
    """What it makes, large but finite, is too much for the next."""
    world.load_model("m", 10)
    world.load_model("n", 3e38)
    world.load_ensemble("m", "n")
    assert world.ask("e") == np.float32(3e38)
    world.load_model("m", 3e38)
    for _ in range(3):
        assert world.ask("m") == np.float32(3e38)
    world.ask_ensemble_until_back()
    assert world.told() == ["m"]
    assert world.ask("m") == 10
    assert world.ask("e") == np.float32(3e38)
    reason = f"in ensemble 'e': version 1: 3 of 3 requests failed; {BETTER}"
    assert world.state("m") == {1: (ModelState.READY, f"rolled back: {reason}")}
    assert world.state("e") == {1: (ModelState.READY, "")}
    assert world.closed() == [1, 1, 1]


@pytest.fixture
def nested(world: World) -> World:
    """`e` of `outer` and `last`, `outer` of `inner` and `n`, `inner` of `m`."""
    for name, add in (("m", 1), ("n", 10), ("last", 100)):
        world.load_model(name, add)
    world.load_ensemble("m", name="inner", ends="ab")
    world.load_ensemble("inner", "n", name="outer", ends="ab")
    world.load_ensemble("outer", "last")
    assert world.ask("e") == 111
    return world


ENSEMBLES = ("inner", "outer", "e")


def test_three_ensembles_deep_the_member_alone_goes_back(nested: World) -> None:
    nested.load_model("m", NAN)
    assert all(nested.on_trial(name) for name in ENSEMBLES)
    nested.ask_ensemble_until_back()
    assert nested.told() == ["m"]
    assert nested.ask("e") == 111
    assert not any(nested.on_trial(name) for name in ENSEMBLES)
    nested.loader.close(TIMEOUT_S)
    assert nested.told() == ["m"]


def test_of_members_that_changed_at_different_depths_the_good_one_stays(nested: World) -> None:
    nested.load_model("m", 2)
    nested.load_model("last", 200)
    nested.load_model("n", NAN)
    nested.ask_ensemble_until_back()
    assert nested.told() == ["n"]
    assert nested.ask("e") == 212
    assert all(nested.on_trial(name) for name in ("m", "last", *ENSEMBLES))
    # They are still held against what passed before all of it.
    nested.back.clear()
    nested.load_model("m", NAN)
    nested.ask_ensemble_until_back()
    assert nested.told() == ["n", "m"]
    assert nested.ask("e") == 211


def test_an_ensemble_inside_another_that_changes_in_part_goes_back_alone(nested: World) -> None:
    """Its new step is of a model that served before; another member is new, and good."""
    nested.load_model("bad", 3e38)
    nested.load_model("m", 2)
    nested.load_ensemble("bad", "bad", name="inner", ends="ab")
    nested.ask_ensemble_until_back()
    assert nested.told() == ["inner"]
    assert nested.ask("e") == 112
    assert nested.on_trial("m")


def test_where_two_members_are_new_both_go_back_in_one_step(world: World) -> None:
    for name, add in (("m", 10), ("n", 10), ("last", 1e37)):
        world.load_model(name, add)
    world.load_ensemble("m", "n", "last")
    for name in "mn":
        world.load_model(name, 1.7e38)
    world.ask_ensemble_until_back()
    assert world.ask("e") == np.float32(1e37)
    world.loader.close(TIMEOUT_S)
    assert sorted(world.told()) == ["m", "n"]


def test_an_ensemble_and_a_member_that_changed_one_after_the_other_are_distinguished(
    world: World,
) -> None:
    """The ensemble is what changed last; the member goes on, still in its canary."""
    world.load_model("m", 10)
    world.load_model("n", NAN)
    world.load_ensemble("m")
    world.load_model("m", 20)
    world.load_ensemble("m", "n")
    world.ask_ensemble_until_back()
    assert world.told() == ["e"]
    assert world.ask("e") == 20
    assert world.on_trial("m")
    # So is the ensemble as it was before, with the new member.
    assert world.on_trial("e")
    world.load_model("m", 3e38)
    assert world.on_trial("e")


def test_an_ensemble_that_only_shows_what_is_wrong_with_a_member_stays_in_its_canary(
    world: World,
) -> None:
    """Both changed, and it is the member whose own answers are not finite."""
    world.load_model("m", 10)
    world.load_model("n", 1)
    world.load_ensemble("m")
    world.load_model("m", NAN)
    world.load_ensemble("m", "n")
    # Whichever of the two is heard first.
    world.ask_ensemble_until_back()
    assert world.told() == ["m"]
    assert world.ask("e") == 11
    assert world.on_trial("e")
    world.loader.close(TIMEOUT_S)
    assert world.told() == ["m"]


def test_an_ensemble_is_watched_no_longer_than_what_it_uses_is_new(world: World) -> None:
    world.load_model("m", 10)
    world.load_ensemble("m")
    assert not world.on_trial("e")
    world.load_model("m", 20)
    model_spec = world.table.serving_spec("m")
    assert model_spec is not None
    assert world.on_trial("e")
    assert world.loader.lifecycle.roll_back(model_spec, "slow")
    assert not world.on_trial("e")
    # What it is and what it uses are as they were: there is nothing to go back to.
    of_e = world.table.serving_spec("e")
    assert of_e is not None
    assert not world.loader.lifecycle.roll_back(of_e, "slow")


@pytest.mark.parametrize(("add", "than"), [(NAN, 10), (3e38, 3e38)])
def test_an_ensemble_that_was_as_bad_before_is_not_held_against_its_member(
    add: float, than: float, world: World
) -> None:
    """It gives numbers that are not finite, or an error as the sum is too large."""
    world.load_model("m", than)
    world.load_model("n", add)
    world.load_ensemble("m", "n")

    def ask() -> None:
        for _ in range(10):
            with contextlib.suppress(InternalError):
                assert np.isnan(world.ask("e"))

    ask()
    world.load_model("m", 0.9 * than)
    ask()
    assert world.monitor("e").fault() == ""
    world.loader.close(TIMEOUT_S)
    assert world.told() == []


@pytest.fixture
def yielding(repository: Path, write_model: WriteModel, counted: CountedBackend) -> Iterator[World]:
    """Where ensembles give way to members that they do not fit."""
    made = World(repository, write_model, counted, take_down=True)
    yield made
    made.loader.close(TIMEOUT_S)


def test_an_ensemble_that_its_member_took_down_comes_back_when_that_goes_back(
    yielding: World,
) -> None:
    yielding.write_model("e", ENSEMBLE.format(1))
    yielding.load(10, name="e")
    yielding.load(NAN, dims="2")
    assert yielding.state("e")[1][0] is ModelState.UNAVAILABLE
    for _ in range(3):
        yielding.ask(size=2)
    assert yielding.back.wait(TIMEOUT_S)
    assert yielding.ask("e") == 10


def test_going_back_takes_down_an_ensemble_that_came_later_where_that_is_configured(
    yielding: World,
) -> None:
    yielding.load(10, dims="1")
    yielding.load(20, dims="2")
    model_spec = yielding.table.serving_spec("m")
    assert model_spec is not None
    yielding.write_model("e", ENSEMBLE.format(2))
    assert yielding.loader.load("e") == {}
    assert yielding.loader.lifecycle.roll_back(model_spec, "slow")
    assert yielding.ask() == 10
    assert yielding.state("e")[1][0] is ModelState.UNAVAILABLE


def test_what_would_break_an_ensemble_that_came_later_is_not_gone_back_to(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.load(10, dims="1")
    world.load(20, dims="2")
    model_spec = world.table.serving_spec("m")
    assert model_spec is not None
    world.write_model("e", ENSEMBLE.format(2))
    assert world.loader.load("e") == {}
    assert not world.loader.lifecycle.roll_back(model_spec, "slow")
    assert "model m: cannot be rolled back: ensemble 'e'" in caplog.text
    reason = world.state()[1][1]
    assert reason.startswith("failed its canary: slow; cannot be rolled back: ensemble 'e'")
    assert world.ask("e", size=2) == 20
    # It was its only chance: what was kept is closed.
    assert world.registry.wait_closed(TIMEOUT_S)
    assert [model.closed for model in world.counted.made] == [1, 0]


def test_what_is_not_in_a_canary_cannot_be_gone_back_from(world: World) -> None:
    world.load(10)
    first = world.table.serving_spec("m")
    assert first is not None
    assert not world.loader.lifecycle.roll_back(first, "slow")
    world.load(20)
    assert not world.loader.lifecycle.roll_back(first, "slow")
    assert world.ask() == 20


def test_a_load_that_is_under_way_survives_a_roll_back(
    world: World, gate: Callable[[str], Gate]
) -> None:
    world.load(10)
    world.load(NAN)
    model_spec = world.table.serving_spec("m")
    assert model_spec is not None
    held = gate("m")
    loading = threading.Thread(target=world.load, args=(30,))
    loading.start()
    assert held.reached.wait(TIMEOUT_S)
    assert world.loader.lifecycle.roll_back(model_spec, "slow")
    assert world.ask() == 10
    held.open()
    loading.join(TIMEOUT_S)
    assert world.ask() == 30
    assert world.closed() == [1, 1, 1]


def test_unload_forgets_what_was_kept(world: World) -> None:
    world.load(10)
    closed = threading.Event()
    world.counted.made[0].close = closed.set
    world.load(20)
    world.loader.lifecycle.unload("m")
    assert closed.wait(TIMEOUT_S)


def test_without_terms_nothing_is_watched_nor_kept(
    repository: Path, write_model: WriteModel, counted: CountedBackend, caplog: object
) -> None:
    registry = ModelRegistry()
    loader = RepositoryLoader(ModelLifecycle(ModelTable(registry)), Repositories([repository]))
    for add in ("1", "2"):
        (write_model("m", CONFIG.format(1, "")) / "1" / "add").write_text(add + "." + add)
        assert loader.load("m") == {}
    assert registry.wait_closed(TIMEOUT_S)
    assert [model.closed for model in counted.made] == [1, 0]
    assert not isinstance(registry.snapshot.find("m").scheduler, WatchedScheduler)


def test_a_caller_always_gets_a_response_while_versions_come_and_fail(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    world.load(10)
    stop = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                value = world.ask()
            except Exception as error:  # noqa: BLE001
                wrong.append(error)
            else:
                if value != 10 and not np.isnan(value):
                    wrong.append(value)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        world.back.clear()
        world.load(NAN)
        assert world.back.wait(TIMEOUT_S)
        # Files as they were load nothing: the next one has another size.
        (world.repository / "m" / "1" / "add").unlink()
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
    assert world.closed() == [1] * 11
