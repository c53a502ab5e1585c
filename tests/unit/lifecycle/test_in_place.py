"""What has not changed of a model is not loaded again."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import NotFound
from edge_server.inference.line import RateLimiter, ResourceLimit
from edge_server.inference.registry import ModelRegistry, ModelState, RefCount
from edge_server.inference.scheduling import Scheduling
from edge_server.lifecycle.build import Build, MemoryBudget, ModelLoad
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec
from edge_server.lifecycle.records import ModelTable
from edge_server.repository.scan import Repositories, files_in
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.counted_backend import CountedBackend, Gate
    from support.model_folders import WriteModel

    from edge_server.inference.registry import LoadedModel, Snapshot

ALL = "version_policy { all {} } "


def config(groups: int = 1, policy: str = ALL, extra: str = "") -> str:
    return (
        'backend: "counted" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
        'output { name: "b" data_type: TYPE_FP32 dims: -1 } '
        f"instance_group {{ count: {groups} }} {policy}{extra}"
    )


class World:
    """A model `m` on disk, and what serves of it."""

    def __init__(self, repository: Path, write_model: WriteModel, counted: CountedBackend) -> None:
        self.directory = repository / "m"
        self.counted = counted
        self.registry = ModelRegistry()
        limiter = RateLimiter([ResourceLimit("r", 1)])
        self.loader = RepositoryLoader(
            ModelLifecycle(ModelTable(self.registry), Build(scheduling=Scheduling(limiter))),
            Repositories([repository]),
        )
        self._write = write_model

    def write(self, text: str, version: int = 1, add: float | None = None) -> None:
        self._write("m", text, version)
        if add is not None:
            (self.directory / str(version) / "add").write_text(str(add))

    def load(self) -> str:
        """Why it failed; empty where it did not."""
        return "".join(str(failure.error) for failure in self.loader.load("m").values())

    def loaded(self, version: int = 1) -> LoadedModel:
        return self.registry.snapshot.find("m", str(version))

    def ask(self, version: int = 1, snapshot: Snapshot | None = None) -> float:
        request = InferRequest("m", {"a": Tensor(np.zeros(1, "<f4"))}, str(version))
        response = (snapshot or self.registry.snapshot).infer(request)
        return float(response.outputs["b"].array[0])

    def settled(self) -> list[int]:
        """How often each model that was ever made has been closed."""
        assert self.registry.wait_closed(30)
        return [model.closed for model in self.counted.made]


@pytest.fixture
def world(repository: Path, write_model: WriteModel, counted: CountedBackend) -> World:
    made = World(repository, write_model, counted)
    made.write(config(), 1, 10)
    assert made.load() == ""
    return made


def test_a_version_that_comes_leaves_the_others_as_they_are(world: World) -> None:
    world.ask()
    before = world.loaded()
    world.write(config(), 2, 20)
    assert world.load() == ""
    assert (world.ask(1), world.ask(2)) == (10, 20)
    assert len(world.counted.made) == 2
    after = world.loaded()
    assert (after.scheduler, after.model) == (before.scheduler, before.model)
    assert after.statistics.counts().success.count == 2
    assert world.settled() == [0, 0]


def test_a_version_that_goes_serves_who_is_under_way_and_nobody_else(world: World) -> None:
    world.write(config(), 2, 20)
    world.load()
    lease = world.registry.lease()
    (world.directory / "1" / "add").unlink()
    (world.directory / "1").rmdir()
    assert world.load() == ""
    with pytest.raises(NotFound):
        world.ask(7)
    assert world.registry.snapshot.entries["m", 1].state is ModelState.UNLOADING
    assert world.ask(1, lease.snapshot) == 10
    lease.release()
    assert world.settled() == [1, 0]
    assert world.ask(2) == 20
    assert len(world.counted.made) == 2


def test_a_change_of_the_version_policy_alone_loads_what_it_adds_and_nothing_else(
    world: World,
) -> None:
    world.write(config(), 2, 20)
    world.load()
    world.write(config(policy="version_policy { latest { num_versions: 1 } } "))
    assert world.load() == ""
    assert world.settled() == [1, 0]
    policy = world.loaded(2).config.message.version_policy
    assert policy.WhichOneof("policy_choice") == "latest"
    world.write(config())
    assert world.load() == ""
    assert (world.ask(1), world.ask(2)) == (10, 20)
    assert world.settled() == [1, 0, 0]


def test_a_change_of_the_instances_alone_makes_instances_of_the_same_model(world: World) -> None:
    world.ask()
    before = world.loaded()
    lease = world.registry.lease()
    world.write(config(groups=3))
    assert world.load() == ""
    after = world.loaded()
    assert after.scheduler is not before.scheduler
    assert [g.count for g in after.config.instance_groups] == [3]
    assert [g.count for g in after.config.message.instance_group] == [3]
    assert (world.ask(), world.ask(1, lease.snapshot)) == (10, 10)
    assert after.statistics.counts().success.count == 3
    lease.release()
    assert world.settled() == [0]
    assert world.ask() == 10
    world.loader.lifecycle.unload("m")
    assert world.settled() == [1]


def test_every_version_keeps_its_model_when_versions_and_instances_change_together(
    world: World,
) -> None:
    world.write(config(groups=2), 2, 20)
    assert world.load() == ""
    assert (world.ask(1), world.ask(2)) == (10, 20)
    assert world.settled() == [0, 0]


@pytest.mark.parametrize("change", ["version", "label", "parameter", "warm-up", "kind"])
def test_any_other_change_loads_anew(world: World, change: str) -> None:
    text = config()
    if change == "version":
        (world.directory / "1" / "add").write_text("11.5")
    elif change == "label":
        (world.directory / "labels.txt").write_text("car")
    elif change == "parameter":
        world.write(config(extra='parameters { key: "k" value { string_value: "v" } }'))
    elif change == "warm-up":
        sample = (
            'model_warmup { name: "w" inputs { key: "a" value { data_type: TYPE_FP32 dims: 1 '
            "zero_data: true } } }"
        )
        world.write(config(extra=sample))
    else:
        world.write(text.replace("count: 1", "count: 1 kind: KIND_MODEL"))
    assert world.load() == ""
    assert world.settled() == [1, 0]


def test_a_failure_of_what_is_new_keeps_all_of_the_old(world: World) -> None:
    world.write(config(groups=2), 2, -1)
    assert "unexpected SystemExit" in world.load()
    assert world.ask(1) == 10
    assert world.settled() == [0]
    with pytest.raises(NotFound):
        world.ask(2)
    # And the index says why.
    assert "unexpected SystemExit" in world.registry.snapshot.entries["m", 1].reason
    world.loader.lifecycle.unload("m")
    assert world.settled() == [1]


def test_what_is_loaded_anew_is_validated_and_what_is_kept_was(world: World) -> None:
    (world.directory / "golden").mkdir()
    np.savez(
        world.directory / "golden" / "one.npz",
        **{"input.a": np.zeros(2, "<f4"), "output.b": np.full(2, 20, "<f4")},
    )
    assert "output 'b' differs by up to 10" in world.load()
    assert world.ask() == 10
    world.write(config(), 1, 20)
    assert world.load() == ""
    assert (world.ask(), world.settled()) == (20, [1, 1, 0])
    world.write(config(groups=2), 1)
    assert world.load() == ""
    # Runs before it serves count nowhere, those since then do.
    assert world.loaded().statistics.counts().success.count == 1


def test_what_is_placed_elsewhere_is_validated_there(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (world.directory / "golden").mkdir()
    pair = {"input.a": np.zeros(2, "<f4"), "output.b": np.full(2, 10, "<f4")}
    np.savez(world.directory / "golden" / "one.npz", **pair)
    world.write(config())
    assert world.load() == ""
    assert world.ask() == 10
    world.write(config().replace("count: 1", "count: 1 kind: KIND_MODEL"))
    with caplog.at_level(logging.INFO):
        assert world.load() == ""
    assert "validated with 1 golden pairs" in caplog.text


def test_instances_that_cannot_be_made_keep_the_old_ones(world: World) -> None:
    need = 'count: 1 rate_limiter { resources { name: "r" count: 2 } }'
    world.write(config().replace("count: 1", need))
    assert "Resource" in world.load()
    assert world.ask() == 10
    assert world.settled() == [0]
    world.loader.lifecycle.unload("m")
    assert world.settled() == [1]


def test_a_model_that_is_unloaded_while_it_is_loaded_anew_is_closed_once(
    world: World, gate: Callable[[str], Gate]
) -> None:
    world.write(config(), 2, 20)
    held = gate("m")
    loading = threading.Thread(target=world.load)
    loading.start()
    held.reached.wait(30)
    world.loader.lifecycle.unload("m")
    held.open()
    loading.join(30)
    assert world.settled() == [1, 1]


def test_memory_is_needed_only_where_something_is_loaded(world: World, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB")
    budget = MemoryBudget(1 << 20, tmp_path)
    build = Build(Scheduling(), budget)
    model_spec = ModelSpec.read(files_in(world.directory))
    failed = build.model(ModelLoad(model_spec))
    assert isinstance(failed, LoadFailure)
    assert "too little memory" in str(failed.error)
    serving = LoadedVersions(model_spec, (world.loaded(),))
    world.write(config(groups=2))
    built = build.model(ModelLoad(ModelSpec.read(files_in(world.directory)), serving))
    assert isinstance(built, LoadedVersions)
    assert built.kept == {1}
    built.close()
    assert world.ask() == 10


def test_a_loaded_model_that_is_closed_cannot_be_shared(world: World) -> None:
    loaded = world.loaded()
    world.loader.lifecycle.unload("m")
    assert world.settled() == [1]
    assert loaded.shared(replace(loaded.config)) is None


def test_the_last_use_is_reported_once() -> None:
    uses = RefCount()
    assert uses.more()
    assert [uses.end(), uses.end()] == [False, True]
    assert not uses.more()
