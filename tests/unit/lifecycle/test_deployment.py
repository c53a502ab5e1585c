"""The states of a delivery: what becomes of one model, whatever happens to it in any order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tritonclient.grpc import model_config_pb2 as pb
from unit.lifecycle.board import CONFIG, LATER_S, Board

from edge_server.errors import InternalError
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.lifecycle.deployment import ModelRecord, Uncopied, Waiting
from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.repository.change_detector import Change
from edge_server.repository.content import content_of
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore, StagedModel
from edge_server.repository.verdicts import (
    GOOD,
    LOADING,
    ON_TRIAL,
    REFUSED,
    ROLLED_BACK,
    WAITS,
)

if TYPE_CHECKING:
    import pytest
    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel

    from edge_server.repository.scan import ModelTree

BROKEN = CONFIG.replace("TYPE_FP32", "TYPE_NONE", 1)
# A canary that ends only where a test ends it.
ENDLESS = CanaryTerms(10**6, 1e6)


class FullStore(ModelStore):
    """A store that copies or commits nothing while a test says so."""

    is_full = cannot_commit = False

    def stage(self, tree: ModelTree) -> StagedModel:
        if self.is_full:
            raise InternalError("the disk is full")
        return super().stage(tree)

    def commit(self, staged: StagedModel) -> None:
        if self.cannot_commit:
            raise InternalError("the disk is full")
        super().commit(staged)


class CanaryBoard(Board):
    """A board on which a new version is on trial until the test judges it."""

    store: FullStore
    store_kind = FullStore
    terms = ENDLESS
    later_s = 0.0

    def tick(self) -> None:
        """As the daemon does about every second."""
        self.table.commit()
        self.later_s += LATER_S  # every pause is over
        for name in self.updates.retry(self.later_s):
            self.carry_out(Change(name, scan_model(self.repository, name)))
        assert self.updates.wait_idle(30.0)


class Machine(RuleBasedStateMachine):
    """Whatever happens to one model, in any order, the daemon does what docs/deployment_states.md
    says."""

    def __init__(self, board: CanaryBoard) -> None:
        super().__init__()
        self.board = board
        self.number = 0
        self.has_memory = True
        self.contents: dict[str, tuple[int, str]] = {}  # digest → number and configuration
        self.quarantined: set[str] = set()
        self.delivered = self.serves = self.kept = ""
        self.before = ""  # the last version that passed, while another one is on trial
        self.outcome = ("", "")
        self.again: str | None = None  # what is loaded, or with "" staged, again
        board.memory(1)

    def expect(self, outcome: str, digest: str, again: str | None = None) -> None:
        self.outcome, self.again = (outcome, digest), again

    def expect_staged(self) -> None:
        digest = self.delivered
        if self.board.store.is_full:
            self.expect(WAITS, "", "")
        elif digest in self.quarantined:
            self.expect(REFUSED, digest)
        elif digest == self.serves:
            self.expect(ON_TRIAL if self.before else GOOD if self.kept == digest else WAITS, digest)
        else:
            self.expect_loaded(digest)

    def expect_loaded(self, digest: str) -> None:
        if self.contents[digest][1] == BROKEN:
            self.expect(REFUSED, digest)
        elif not self.has_memory:
            self.expect(WAITS, digest, digest)
        elif self.serves:
            self.before, self.serves = self.before or self.serves, digest
            self.expect(ON_TRIAL, digest)
        else:
            self.serves = digest
            self.expect(LOADING, digest)
            self.expect_committed()

    def expect_committed(self) -> None:
        if not self.board.store.cannot_commit:
            self.kept = self.serves
        if self.outcome[1] == self.serves:
            self.expect(GOOD if self.kept == self.serves else WAITS, self.serves)

    # What happens to both.

    def bring(self, number: int, config: str) -> None:
        self.board.write_model("m", config)
        (self.board.repository / "m" / "1" / "add").write_text(f"{number}")
        tree = scan_model(self.board.repository, "m")
        self.delivered = content_of(tree).digest
        self.contents[self.delivered] = (number, config)
        self.board.carry_out(Change("m", tree))
        self.expect_staged()

    @rule(config=st.sampled_from([CONFIG, CONFIG, BROKEN]))
    def deliver(self, config: str) -> None:
        self.number += 1
        self.bring(self.number, config)

    @precondition(lambda self: self.serves)
    @rule()
    def deliver_what_serves(self) -> None:
        self.bring(*self.contents[self.serves])

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def deliver_from_quarantine(self, data: st.DataObject) -> None:
        self.bring(*self.contents[data.draw(st.sampled_from(sorted(self.quarantined)))])

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.quarantined.discard(digest)
        self.board.store.release(digest)
        if self.outcome[0] in (REFUSED, ROLLED_BACK) and self.outcome[1] == digest:
            self.board.carry_out(Change("m", scan_model(self.board.repository, "m")))
            self.expect_staged()

    @rule(has_memory=st.booleans())
    def lend_memory(self, has_memory: bool) -> None:
        self.has_memory = has_memory
        self.board.memory(int(has_memory))

    @rule(is_full=st.booleans())
    def fill_disk(self, is_full: bool) -> None:
        self.board.store.is_full = is_full

    @rule(cannot_commit=st.booleans())
    def break_state_file(self, cannot_commit: bool) -> None:
        self.board.store.cannot_commit = cannot_commit

    @rule()
    def wait(self) -> None:
        if self.again and not self.has_memory:
            return
        self.board.tick()
        if self.serves and self.serves != self.kept and not self.before:
            self.expect_committed()
        if self.again == "":
            self.expect_staged()
        elif self.again is not None:
            self.expect_loaded(self.again)

    @precondition(lambda self: self.before)
    @rule(passes=st.booleans())
    def judge(self, passes: bool) -> None:
        lifecycle, table = self.board.loader.lifecycle, self.board.table
        spec = table.serving_spec("m")
        assert spec is not None
        if passes:
            with table.lock:
                lifecycle.end_canaries(["m"])
            table.commit()
            self.before = ""
            self.expect_committed()
        else:
            assert lifecycle.roll_back(spec, "worse")
            self.quarantined.add(self.serves)
            if self.outcome == (ON_TRIAL, self.serves):
                self.expect(ROLLED_BACK, self.serves)
            self.serves, self.before = self.before, ""
            self.expect_committed()

    @rule()
    def remove(self) -> None:
        if self.delivered and not self.board.store.is_full:
            self.board.carry_out(Change("m", None))
            self.serves = self.before = self.kept = ""
            self.expect("", "")

    @rule()
    def restart(self) -> None:
        self.lend_memory(True)
        self.board.start_again()
        kept = self.board.store.last_good()
        assert (kept["m"].digest if kept else "") == self.kept
        self.serves, self.before = self.kept, ""
        self.expect(GOOD if self.kept else "", self.kept)

    def teardown(self) -> None:
        self.board.close()

    @invariant()
    def they_are_as_expected(self) -> None:
        with self.board.table.lock:
            record = self.board.table.get("m")
            copy, outcome = record.serving_copy, record.outcome
            last_good, canary = record.last_good, record.canary
            waits = isinstance(record.delivery, Waiting | Uncopied)
        assert ("" if copy is None else copy.digest) == self.serves
        assert outcome[:2] == self.outcome
        assert (canary is not None) == bool(self.before)
        assert waits == (self.again is not None)
        assert ("" if last_good is None else last_good.digest) == self.kept
        for digest in self.contents:
            assert bool(self.board.store.quarantined(digest)) == (digest in self.quarantined)


def test_a_delivery_goes_as_the_table_says(
    repository: Path,
    write_model: WriteModel,
    counted: CountedBackend,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def machine() -> Machine:
        return Machine(CanaryBoard(tmp_path_factory.mktemp("board"), repository, write_model))

    run_state_machine_as_test(
        machine,
        settings=settings(
            stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# One record, without the parts around it.

MODEL_CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "identity"', pb.ModelConfig()))
STORE = Path("/store")


def copy(digest: str) -> StagedModel:
    return StagedModel("m", digest, STORE / digest / "m", ())


def spec(staged: StagedModel | None = None) -> ModelSpec:
    files = ModelFiles("m", Path("/models/m"), {1: Path("/models/m/1")})
    return ModelSpec(
        replace(files, holder=staged), MODEL_CONFIG, (1,), frozenset({(str(id(staged)),)})
    )


def serve(record: ModelRecord, staged: StagedModel) -> None:
    model_spec = spec(staged)
    record.begin_load(model_spec, explicit=True)
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
    assert record.verdict(STORE)[4:7] == ("1", "1", "1/m")


def test_a_verdict_on_a_candidate_is_one_on_the_content_that_it_was_found_of() -> None:
    record, first = ModelRecord("m"), copy("1")
    record.deliver(first, Path("/models/m"))
    serve(record, first)
    record.candidate = "1", "good: in 700 frames", "lanes"
    assert record.verdict(STORE)[7:] == ("good: in 700 frames", "lanes")
    record.candidate = "0", "good: in 700 frames", "lanes"
    assert record.verdict(STORE)[7:] == ("", "")
