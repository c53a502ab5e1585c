"""One record of a model: what becomes of each copy, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.inference.registry import ModelState
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure, ModelSpec
from edge_server.lifecycle.records import ModelRecord
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import GOOD, LOADING, ROLLED_BACK

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
    serve(record, second)
    record.deliver(third, Path("/models/m"))
    record.rolled_back(second, "slow")
    assert record.accepted is third
    assert record.outcome == (LOADING, "3", "")
    serve(record, third)
    serve(record, first)
    record.rolled_back(third, "slow")
    assert record.outcome == (ROLLED_BACK, "3", "slow")
    assert record.accepted is first


def test_a_canary_that_passed_before_its_report_is_good() -> None:
    record, first = ModelRecord("m"), copy("1")
    record.deliver(first, Path("/models/m"))
    serve(record, first)
    assert record.uncommitted is first
    record.is_good(first)
    assert record.uncommitted is None
    assert record.verdict(STORE)[:2] == (GOOD, "1")
    assert record.verdict(STORE)[4:] == ("1", "1", "1/m")


class Record(RuleBasedStateMachine):
    """Deliveries, loads and rollbacks of one model, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.record = ModelRecord("m")
        self.served: set[str] = set()
        self.number = 0
        self.updates: list[StagedModel] = []

    @rule()
    def deliver(self) -> None:
        self.number += 1
        self.updates.append(copy(str(self.number)))
        self.record.deliver(self.updates[-1], Path("/models/m"))
        assert self.record.outcome.outcome == LOADING

    @rule(ends=st.sampled_from(["serves", "fails"]))
    def load(self, ends: str) -> None:
        if not self.updates:
            return
        loaded = self.updates.pop()
        self.updates.clear()
        assert self.record.accepted is loaded
        if ends == "serves":
            serve(self.record, loaded)
            self.served.add(loaded.digest)
        else:
            failure = LoadFailure(ModelConfigError("broken"), model_spec=spec(loaded))
            self.record.fail(failure)
            self.record.not_loaded(loaded, failure, 0.0, passes=False, served=False)
            assert self.record.accepted is not loaded

    @rule()
    def note(self) -> None:
        if (copy := self.record.uncommitted) is not None:
            self.record.is_good(copy)

    @rule()
    def unload(self) -> None:
        self.record.unload(waits=False)

    @invariant()
    def the_newest_delivery_is_what_loads_next(self) -> None:
        if self.updates:
            assert self.record.accepted is self.updates[-1]

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
