"""A preferred configuration takes over from its stand-in, or leaves the reason why it does not."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.waiting import wait_until

from edge_server.errors import ModelConfigError
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.inference.registry import ModelEntry, ModelRegistry
from edge_server.lifecycle import loader as take_over
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

    from edge_server.lifecycle.model_spec import ModelSpec

CONFIG = (
    'backend: "counted" input { name: "a" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 1 } '
)
PREFERS = CONFIG + 'parameters { key: "preferred_configs" value { string_value: "%s" } }'


class HeardTable(ModelTable):
    """Keeps what is quarantined in memory."""

    def __init__(self) -> None:
        super().__init__(ModelRegistry())
        self.quarantined: list[tuple[str, bool]] = []

    def quarantine(self, model_spec: ModelSpec, reason: str, *, only_this: bool) -> None:
        self.quarantined.append((model_spec.files.config_name, only_this))

    def why_not(self, model_spec: ModelSpec) -> str:
        names = {name for name, _ in self.quarantined}
        return "in quarantine" if model_spec.files.config_name in names else ""


class World:
    """A repository with a model `m` that prefers `fast`, whose file must be prepared."""

    def __init__(self, repository: Path, write_model: WriteModel, counted: CountedBackend) -> None:
        table = HeardTable()
        self.registry, self.quarantined = table.registry, table.quarantined
        self.loader = RepositoryLoader(
            ModelLifecycle(
                table,
                terms=CanaryTerms(requests=10**9, least_s=1e9, longest_s=1e9),
            ),
            Repositories([repository]),
        )
        self.directory = write_model("m", PREFERS % "fast")
        (self.directory / "1" / "add").write_text("1")
        self.prefer("fast", 2)
        counted.to_prepare.add("fast")

    def prefer(self, name: str, add: float) -> None:
        (self.directory / "configs").mkdir(exist_ok=True)
        text = f'{CONFIG} default_model_filename: "{name}"'
        (self.directory / "configs" / f"{name}.pbtxt").write_text(text)
        (self.directory / "1" / name).write_text(str(add))

    @property
    def entry(self) -> ModelEntry:
        return self.registry.snapshot.entries["m", 1]

    @property
    def file(self) -> str:
        assert self.entry.configuration is not None, self.entry
        return self.entry.configuration.file

    def ask(self) -> float:
        request = InferRequest("m", {"a": Tensor(np.zeros(1, "<f4"))}, "")
        lease = self.registry.lease()
        try:
            return float(lease.snapshot.infer(request).outputs["b"].array[0])
        finally:
            lease.release()

    def start(self) -> None:
        self.loader.take_over.start()
        assert self.loader.load("m") == {}


@pytest.fixture
def world(repository: Path, write_model: WriteModel, counted: CountedBackend) -> Iterator[World]:
    world = World(repository, write_model, counted)
    yield world
    world.loader.close(5.0)


def test_the_stand_in_serves_until_the_preferred_one_is_prepared(
    world: World, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    prepared = gate("fast")
    world.start()
    assert prepared.reached.wait(30)
    assert (world.file, world.ask()) == ("config.pbtxt", 1)
    wait_until(
        lambda: world.entry.reason == "degraded: configs/fast.pbtxt: plan building: half of it"
    )
    # A load of the same files leaves it to the preparation.
    loads = counted.loads["m"]
    assert world.loader.load("m") == {}
    assert counted.loads["m"] == loads
    prepared.open()
    wait_until(lambda: world.file == "configs/fast.pbtxt")
    assert world.ask() == 2
    assert "degraded" not in world.entry.reason


def test_a_model_that_prefers_nothing_is_prepared_by_its_load(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    directory = write_model("alone", CONFIG + 'default_model_filename: "only"')
    (directory / "1" / "only").write_text("5")
    counted.to_prepare.add("only")
    assert world.loader.load("alone") == {}
    assert world.registry.snapshot.entries["alone", 1].reason == ""


def test_without_a_start_nothing_is_prepared(world: World, counted: CountedBackend) -> None:
    assert world.loader.load("m") == {}
    assert world.entry.reason == "degraded: configs/fast.pbtxt: fast is not prepared"
    assert counted.to_prepare == {"fast"}


def test_what_cannot_be_prepared_leaves_its_reason_and_is_tried_again(
    world: World, counted: CountedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_over, "_FIRST_PAUSE_S", 0.01)
    counted.cannot_prepare = ModelConfigError("refused")
    world.start()
    wait_until(lambda: world.entry.reason == "degraded: configs/fast.pbtxt: refused")
    assert world.ask() == 1
    counted.cannot_prepare = None
    wait_until(lambda: world.file == "configs/fast.pbtxt")


def test_one_that_is_prepared_and_cannot_be_loaded_stays_out_until_the_next_load(
    world: World, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    prepared = gate("fast")
    world.start()
    counted.fails["m"] = ModelConfigError("gives no lanes")
    prepared.open()
    wait_until(lambda: world.entry.reason == "degraded: configs/fast.pbtxt: gives no lanes")
    wait_until(lambda: "take-over-m" not in {each.name for each in threading.enumerate()})
    assert world.ask() == 1
    del counted.fails["m"]
    assert world.loader.load("m") == {}
    wait_until(lambda: world.file == "configs/fast.pbtxt")


def test_one_that_is_rolled_back_is_quarantined_alone_and_its_stand_in_serves(
    world: World,
) -> None:
    world.prefer("fast", float("nan"))
    world.start()
    wait_until(lambda: world.file == "configs/fast.pbtxt")
    for _ in range(3):
        world.ask()
    wait_until(lambda: world.file == "config.pbtxt")
    assert world.quarantined == [("configs/fast.pbtxt", True)]
    assert world.entry.reason.startswith("rolled back: ")
    assert world.ask() == 1
    assert world.loader.load("m") == {}
    wait_until(
        lambda: world.entry.reason == "degraded: configs/fast.pbtxt: in quarantine",
        otherwise=lambda: world.entry.reason,
    )
    assert world.ask() == 1


def test_a_new_version_is_prepared_while_the_preferred_one_serves_on(
    world: World, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    world.start()
    wait_until(lambda: world.file == "configs/fast.pbtxt")
    counted.to_prepare.add("fast")
    world.prefer("fast", 3)
    prepared = gate("fast")
    loads = threading.Thread(target=world.loader.load, args=("m",))
    loads.start()
    assert prepared.reached.wait(30)
    assert (world.file, world.ask()) == ("configs/fast.pbtxt", 2)
    prepared.open()
    loads.join(30)
    assert (world.file, world.ask()) == ("configs/fast.pbtxt", 3)


def test_the_next_one_in_preference_serves_until_the_first_can(
    world: World, counted: CountedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_over, "_FIRST_PAUSE_S", 0.01)
    (world.directory / "config.pbtxt").write_text(PREFERS % "best, fast")
    world.prefer("best", 4)
    counted.to_prepare.add("best")
    counted.cannot_prepare = ModelConfigError("no such core")
    counted.to_prepare.discard("fast")
    world.start()
    assert (world.file, world.ask()) == ("configs/fast.pbtxt", 2)
    assert world.entry.reason.startswith("degraded: configs/best.pbtxt: ")
    counted.cannot_prepare = None
    wait_until(lambda: world.file == "configs/best.pbtxt")
    assert world.ask() == 4
