"""One record of a model: what becomes of each copy, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError, Unavailable
from edge_server.inference.registry import ModelRegistry, ModelState
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec, TooLittleMemory
from edge_server.lifecycle.records import ModelRecord, ModelTable
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.repository.change_detector import SeenFiles
from edge_server.repository.scan import FileSet
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import GOOD, LOADING, REFUSED, ROLLED_BACK

if TYPE_CHECKING:
    from edge_server.errors import EdgeServerError

CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "identity"', pb.ModelConfig()))
STORE = Path("/store")


def copy(digest: str) -> StagedModel:
    return StagedModel("m", digest, STORE / digest / "m", ())


def spec(staged: StagedModel | None = None) -> ModelSpec:
    files = ModelFiles("m", Path("/models/m"), {1: Path("/models/m/1")})
    return ModelSpec(replace(files, holder=staged), CONFIG, (1,), frozenset({(str(id(staged)),)}))  # type: ignore[arg-type]


def serve(record: ModelRecord, staged: StagedModel) -> None:
    model_spec = spec(staged)
    record.begin(model_spec, explicit=True)
    record.serve(LoadedVersions(model_spec))


def test_a_new_delivery_outlives_the_rollback_of_the_one_before() -> None:
    record, first, second, third = ModelRecord("m"), copy("1"), copy("2"), copy("3")
    record.deliver(first, Path("/models/m"))
    serve(record, first)
    record.is_good(first)
    record.deliver(second, Path("/models/m"))
    record.deliver(third, Path("/models/m"))
    record.rolled_back(second, "slow")
    assert record.accepted is third
    assert (record.outcome, record.digest) == (ROLLED_BACK, "2")
    record.rolled_back(third, "slow")
    assert record.accepted is first


def test_a_canary_that_passed_before_its_report_is_good() -> None:
    record, first = ModelRecord("m"), copy("1")
    serve(record, first)
    record.is_good(first)
    assert not record.report_serving(first)
    assert record.verdict(STORE)[:2] == (GOOD, "1")
    assert record.verdict(STORE)[4:] == ("1", "1", "1/m")


def test_a_copy_that_no_longer_serves_is_not_reported() -> None:
    record = ModelRecord("m")
    serve(record, copy("1"))
    assert not record.report_serving(copy("2"))
    assert record.deployed is None


@pytest.mark.parametrize(
    ("error", "needs_bytes"), [(TooLittleMemory("no room", 7), 7), (Unavailable("later"), 0)]
)
def test_what_a_load_lacked_is_known_until_the_next_one(
    error: EdgeServerError, needs_bytes: int
) -> None:
    record, model_spec = ModelRecord("m"), spec()
    record.begin(model_spec, explicit=False)
    record.fail(LoadFailure(error, model_spec=model_spec))
    assert (record.needs_bytes, record.state) == (needs_bytes, ModelState.UNAVAILABLE)
    serve(record, copy("1"))
    assert record.needs_bytes == 0


def test_a_directory_that_came_and_went_leaves_no_record() -> None:
    table = ModelTable(ModelRegistry())
    seen = SeenFiles().scanned(FileSet((), ()), 0.0)
    table.note_seen({"m": seen, "n": seen})
    table["n"].report(REFUSED, "", "broken")
    table.note_seen({})
    assert [record.name for record in table] == ["n"]


class Record(RuleBasedStateMachine):
    """Deliveries, loads and rollbacks of one model, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.record = ModelRecord("m")
        self.failed: set[str] = set()
        self.served: set[str] = set()
        self.number = 0
        self.updates = []  # type: ignore[var-annotated]

    @rule()
    def deliver(self) -> None:
        self.number += 1
        self.updates.append(self.record.deliver(copy(str(self.number)), Path("/models/m")))
        assert self.record.outcome == LOADING

    @rule(ends=st.sampled_from(["serves", "fails"]))
    def load(self, ends: str) -> None:
        if not self.updates:
            return
        update = self.updates.pop(0)
        loaded = self.record.accepted
        assert loaded is not None
        if ends == "serves":
            serve(self.record, loaded)
            self.served.add(loaded.digest)
        else:
            self.record.fail(LoadFailure(ModelConfigError("broken"), model_spec=spec(loaded)))
            self.failed.add(update.copy.digest)
            self.record.decline(update)

    @rule()
    def note(self) -> None:
        serving = self.record.serving_copy
        if serving is not None and self.record.report_serving(serving):
            self.record.is_good(serving)

    @rule()
    def unload(self) -> None:
        self.record.unload(waits=False)

    @invariant()
    def the_newest_delivery_is_what_loads_next(self) -> None:
        if self.updates:
            assert self.record.accepted is self.updates[-1].copy

    @invariant()
    def entries_agree_with_the_record(self) -> None:
        states = {entry.state for entry in self.record.entries()}
        assert len(states) <= 1
        assert (self.record.serving is None) or not states - {ModelState.READY}

    @invariant()
    def what_a_restart_serves_has_served(self) -> None:
        if self.record.last_good is not None:
            assert self.record.last_good.digest in self.served


def test_no_delivery_is_lost_and_only_what_served_is_kept() -> None:
    run_state_machine_as_test(
        Record, settings=settings(deadline=None, suppress_health_check=list(HealthCheck))
    )
