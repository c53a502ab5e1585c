"""The states of a deployment, driven beside the daemon's own updates of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edge_server.errors import InternalError
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.build import MemoryBudget
from edge_server.lifecycle.deployment import (
    Absent,
    Action,
    Deployment,
    Event,
    OnTrial,
    Serving,
    Waiting,
    step,
)
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.lifecycle.updates import Deployments, Updates
from edge_server.repository.change_detector import Change
from edge_server.repository.content import content_of
from edge_server.repository.scan import look
from edge_server.repository.store import ModelStore
from tests.unit.lifecycle.board import CONFIG, LATER_S, Board

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    import pytest
    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel

    from edge_server.repository.scan import ModelTree
    from edge_server.repository.store import StagedModel

BROKEN = CONFIG.replace("TYPE_FP32", "TYPE_NONE", 1)
# A canary that ends only where a test ends it.
ENDLESS = CanaryTerms(10**6, 1e6)
GIVEN_UP = "the board lacks something"


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
    later_s = 0.0

    def open(self, stop: threading.Event | None = None) -> None:
        self.registry = ModelRegistry()
        self.store = FullStore(self.folder / "store")
        self.table = ModelTable(self.registry)
        self.deployments = Deployments(self.table, self.store, [])
        self.budget = MemoryBudget(0, self.folder)
        self.loader = RepositoryLoader(
            self.table,
            self.deployments,
            budget=self.budget,
            canary_terms=ENDLESS,
            quarantine=self.deployments.quarantine,
            on_rolled_back=self.deployments.rolled_back,
            on_passed=self.deployments.passed,
        )
        self.updates = Updates(self.loader, self.deployments, budget=self.budget)
        self.updates.load_last_good(stop)

    def tick(self) -> None:
        """As the daemon does about every second."""
        self.deployments.note_serving()
        self.later_s += LATER_S  # every pause is over
        for name in self.updates.retry(self.later_s):
            self.carry_out(Change(name, look(self.repository, name)))
        assert self.updates.wait_idle(30.0)


class Machine(RuleBasedStateMachine):
    """Whatever happens to one model, in any order, the table says what the daemon makes of it."""

    def __init__(self, board: CanaryBoard) -> None:
        super().__init__()
        self.board = board
        self.now = Deployment()
        self.number = 0
        self.has_memory = True
        self.contents: dict[str, tuple[int, str]] = {}  # digest → number and configuration
        self.delivered = ""
        self.reported = ("", "")
        self.quarantined: set[str] = set()
        board.memory(1)

    # The table's side: what the daemon would do, and what comes of it.

    def happens(self, event: Event) -> None:
        self.now, actions = step(self.now, event)
        for action in actions:
            after = self.do(action)
            if after is not None:
                self.happens(after)

    def do(self, action: Action) -> Event | None:
        digest = action.digest
        match action.verb:
            case "report":
                self.reported = (action.text, digest)
            case "forget":
                self.reported = ("", "")
            case "quarantine":
                self.quarantined.add(digest)
            case "stage":
                return self.stage()
            case "load":
                return self.load(digest)
            case "commit" if self.board.store.cannot_commit:
                return Event("not committed", digest, "the disk is full")
            case "commit":
                return Event("committed", digest)
        return None

    def stage(self) -> Event:
        if self.board.store.is_full:
            return Event("not copied", "", "the disk is full", may_pass=True)
        if self.delivered in self.quarantined:
            return Event("held", self.delivered, "rolled back")
        return Event("copied", self.delivered)

    def load(self, digest: str) -> Event:
        if self.contents[digest][1] == BROKEN:
            return Event("not loaded", digest, "broken", may_pass=False)
        if not self.has_memory:
            return Event("not loaded", digest, GIVEN_UP, may_pass=True)
        return Event("loaded", digest)

    # What happens to both.

    def bring(self, number: int, config: str) -> None:
        self.board.write_model("m", config)
        (self.board.repository / "m" / "1" / "add").write_text(f"{number}")
        tree = look(self.board.repository, "m")
        self.delivered = content_of(tree).digest
        self.contents[self.delivered] = (number, config)
        self.board.carry_out(Change("m", tree))
        self.happens(Event("changed"))

    @rule(config=st.sampled_from([CONFIG, CONFIG, BROKEN]))
    def deliver(self, config: str) -> None:
        self.number += 1
        self.bring(self.number, config)

    @precondition(lambda self: not isinstance(self.now.serves, Absent))
    @rule()
    def deliver_what_serves(self) -> None:
        self.bring(*self.contents[self.now.serves.digest])

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
        if getattr(self.now.delivery, "digest", "") == digest:
            self.board.carry_out(Change("m", look(self.board.repository, "m")))
        self.happens(Event("released", digest))

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
        lacks_memory = isinstance(self.now.delivery, Waiting) and self.now.delivery.digest
        if lacks_memory and not self.has_memory:
            return
        self.board.tick()
        self.happens(Event("due"))

    @precondition(lambda self: isinstance(self.now.serves, OnTrial))
    @rule(passes=st.booleans())
    def judge(self, passes: bool) -> None:
        lifecycle, table = self.board.loader.lifecycle, self.board.table
        spec = table.serves("m")
        assert spec is not None
        if passes:
            with table.lock:
                lifecycle._canary.forget(["m"])
            self.board.deployments.passed(spec)
            self.happens(Event("passed", self.now.serves.digest))
        else:
            assert lifecycle.roll_back(spec, "worse")
            self.happens(Event("worse", self.now.serves.digest, "worse"))

    @rule()
    def remove(self) -> None:
        if self.delivered and not self.board.store.is_full:
            self.board.carry_out(Change("m", None))
            self.happens(Event("removed"))

    @rule()
    def restart(self) -> None:
        self.lend_memory(True)
        self.board.start_again()
        serves = self.now.serves
        while isinstance(serves, OnTrial):
            serves = serves.before
        kept = self.board.store.last_good()
        self.reported = ("", "")
        self.happens(Event("started", kept["m"].digest if kept else ""))

    def teardown(self) -> None:
        self.board.close()

    @invariant()
    def both_are_alike(self) -> None:
        with self.board.table.lock:
            record = self.board.table.get("m")
            copy, outcome = record.serving_copy, (record.outcome, record.digest)
            last_good, canary = record.last_good, record.canary
            waits = record.retry is not None or record.staging is not None
        serves = self.now.serves
        assert ("" if copy is None else copy.digest) == serves.digest
        assert outcome[0] == self.reported[0]
        if outcome[0]:
            assert outcome == self.reported
        assert (canary is not None) == isinstance(serves, OnTrial)
        assert waits == isinstance(self.now.delivery, Waiting)
        if isinstance(serves, Serving) and serves.is_kept:
            assert last_good is not None
            assert last_good.digest == serves.digest
        for digest in self.contents:
            assert bool(self.board.store.quarantined(digest)) == (digest in self.quarantined)


def test_a_deployment_goes_as_the_table_says(
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
            stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
