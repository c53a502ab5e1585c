"""Of an update nothing counts before its time: loaded is what was believed, good what has passed,
and what failed is in nobody's way."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.waiting import wait_until
from unit.lifecycle.board import TIMEOUT_S, Board

from edge_server.errors import InternalError, NotFound
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.inference.data_plane import DataPlane
from edge_server.lifecycle import poll
from edge_server.repository.change_detector import Change
from edge_server.repository.scan import ModelTree, scan_model
from edge_server.repository.verdicts import GOOD, ON_TRIAL, ROLLED_BACK, WAITS
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend, Gate
    from support.model_folders import WriteModel

    from edge_server.inference.registry import ModelEntry

COUNTED = 'backend: "counted"'
TENSORS = (
    'input { name: "a" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 1 } '
)
STEP = (
    'model_name: "m" model_version: -1 '
    'input_map { key: "a" value: "a" } output_map { key: "b" value: "b" }'
)


ENSEMBLE = f'platform: "ensemble" ensemble_scheduling {{ step {{ {STEP} }} }}'


class Bench(Board):
    """A board on which a new version passes its canary with ten requests."""

    terms = CanaryTerms(requests=10, least_s=0.0)

    def change(self, name: str, config: str, number: str) -> None:
        """Put a model there, and let it be believed; it is staged when this returns."""
        directory = self.repository / name
        (directory / "1").mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(TENSORS + config)
        (directory / "1" / "add").write_text(number)
        assert not self.updates.carry_out([Change(name, scan_model(self.repository, name))])

    def changed(self, name: str, config: str, number: str) -> None:
        self.change(name, config, number)
        assert self.updates.wait_idle(TIMEOUT_S)

    def ask(self, name: str) -> float:
        request = InferRequest(name, {"a": Tensor(np.zeros(1, np.float32))})
        return float(DataPlane(self.registry).infer(request).outputs["b"].array[0])

    def entry(self) -> ModelEntry:
        return self.registry.snapshot.entries["m", 1]

    def last_good(self) -> str:
        return (self.store.last_good()["m"].directory / "1" / "add").read_text()


@pytest.fixture
def bench(
    counted: CountedBackend, tmp_path: Path, repository: Path, write_model: WriteModel
) -> Iterator[Bench]:
    made = Bench(tmp_path, repository, write_model)
    yield made
    made.close()


def test_what_is_loaded_is_what_was_detected_whatever_became_of_the_repository(
    bench: Bench, gate: Callable[[str], Gate]
) -> None:
    before_load = gate("m")
    bench.change("m", COUNTED, "7")
    assert before_load.reached.wait(TIMEOUT_S)
    shutil.rmtree(bench.repository)
    before_load.open()
    assert bench.updates.wait_idle(TIMEOUT_S)
    assert bench.ask("m") == 7


def test_a_copy_that_comes_while_the_copy_before_it_fails_is_loaded(
    bench: Bench, gate: Callable[[str], Gate]
) -> None:
    bench.changed("m", COUNTED, "7")
    before_load = gate("m")
    bench.change("m", COUNTED, "-1")
    assert before_load.reached.wait(TIMEOUT_S)
    bench.change("m", COUNTED, "8")
    before_load.open()
    assert bench.updates.wait_idle(TIMEOUT_S)
    assert bench.ask("m") == 8
    assert bench.table.get("m").outcome.outcome == ON_TRIAL


@pytest.mark.parametrize("meanwhile", ["copied again", "taken away"])
def test_a_copy_that_is_made_while_an_earlier_change_is_applied_is_loaded(
    bench: Bench, gate: Callable[[str], Gate], meanwhile: str
) -> None:
    """The copies of one scan take long, and are all made before the first is loaded."""
    before_load = gate("m")
    bench.change("m", COUNTED, "7")
    assert before_load.reached.wait(TIMEOUT_S)
    if meanwhile == "copied again":
        bench.change("m", COUNTED, "7")
    else:
        assert not bench.updates.carry_out([Change("m", None)])

    def changes() -> Iterator[Change]:
        (bench.repository / "m" / "1" / "add").write_text("8")
        yield Change("m", scan_model(bench.repository, "m"))
        before_load.open()
        assert bench.updates.wait_idle(TIMEOUT_S)

    assert not bench.updates.carry_out(changes())
    assert bench.updates.wait_idle(TIMEOUT_S)
    assert bench.ask("m") == 8


def test_one_model_loads_at_a_time_and_one_that_hangs_holds_the_others_up_for_a_while_only(
    bench: Bench,
    counted: CountedBackend,
    gate: Callable[[str], Gate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, timeout_s in ("7", TIMEOUT_S), ("8", 0.01):
        monkeypatch.setattr(poll, "LOAD_TIMEOUT_S", timeout_s)
        hangs = gate("m")
        bench.change("m", COUNTED, number)
        assert hangs.reached.wait(TIMEOUT_S)
        bench.change("n", COUNTED, number)
        if number == "7":
            assert "n" not in counted.loads
        else:
            wait_until(lambda: bench.ask("n") == 8)
        hangs.open()
        assert bench.updates.wait_idle(TIMEOUT_S)
        assert bench.ask("m") == bench.ask("n") == int(number)


def test_a_failure_of_an_earlier_change_leaves_the_newer_delivery_as_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.changed("m", COUNTED, "7")

    def forget(_: str) -> None:
        bench.change("m", COUNTED, "8")
        raise InternalError("no room")

    monkeypatch.setattr(bench.store, "forget", forget)
    bench.carry_out(Change("m", None))
    record = bench.table.get("m")
    assert (bench.ask("m"), record.outcome.outcome) == (8, GOOD)


def test_a_refusal_waits_for_no_load_and_is_shown_after_it(
    bench: Bench, gate: Callable[[str], Gate]
) -> None:
    """A load may hang, and the other models of the scan must not."""
    bench.changed("m", COUNTED, "7")
    before_load = gate("m")
    bench.change("m", COUNTED, "8")
    assert before_load.reached.wait(TIMEOUT_S)
    broken = ModelTree("m", bench.repository, fault="a link leads out of it")
    with ThreadPoolExecutor(1) as pool:
        scan = pool.submit(bench.updates.carry_out, [Change("m", broken)])
        try:
            assert scan.result(TIMEOUT_S) == []
        finally:
            before_load.open()
    assert bench.updates.wait_idle(TIMEOUT_S)
    assert bench.ask("m") == 8
    (entry,) = bench.table.registry.snapshot.index(only_ready=True)
    assert entry.reason == "a link leads out of it"


@pytest.mark.parametrize("loaded", ["8", "-1"])
def test_a_copy_for_which_the_disk_had_no_room_during_a_load_is_still_due(
    loaded: str, bench: Bench, gate: Callable[[str], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.changed("m", COUNTED, "7")
    before_load = gate("m")
    bench.change("m", COUNTED, loaded)
    assert before_load.reached.wait(TIMEOUT_S)
    monkeypatch.setattr(bench.store, "stage", Mock(side_effect=InternalError("no room")))
    bench.change("m", COUNTED, "9")
    before_load.open()
    assert bench.updates.wait_idle(TIMEOUT_S)
    assert bench.updates.retry(time.monotonic() + 3600) == {"m"}


def test_what_is_in_its_canary_is_not_yet_the_last_known_good(bench: Bench) -> None:
    bench.changed("m", COUNTED, "7")
    bench.changed("m", COUNTED, "8")
    assert bench.ask("m") == 8
    assert bench.last_good() == "7"
    for _ in range(10):
        bench.ask("m")
    wait_until(lambda: bench.last_good() == "8", TIMEOUT_S)


IDLE = COUNTED + ' parameters { key: "idle_unload_s" value { string_value: "60" } }'


def unload_idle(bench: Bench) -> None:
    now = time.monotonic()
    bench.loader.idle.unload_idle(now)
    bench.loader.idle.unload_idle(now + 61)


@pytest.mark.parametrize("ends", ["passes", "fails"])
def test_a_change_of_an_idle_model_wakes_it_so_that_its_canary_has_a_predecessor(
    bench: Bench, counted: CountedBackend, ends: str
) -> None:
    bench.changed("m", IDLE, "7")
    unload_idle(bench)
    assert bench.entry().is_idle
    bench.changed("m", IDLE, "8" if ends == "passes" else "nan")
    record = bench.table.get("m")
    assert record.outcome.outcome == ON_TRIAL
    assert counted.loads["m"] == 3
    # A canary has not passed before its requests came, however long that takes.
    unload_idle(bench)
    assert not bench.entry().is_idle
    if ends == "passes":
        for _ in range(10):
            bench.ask("m")
        wait_until(lambda: record.canary is None, TIMEOUT_S)
        assert bench.last_good() == "8"
        unload_idle(bench)
        assert bench.entry().is_idle
    else:
        wait_until(lambda: bench.ask("m") == 7, TIMEOUT_S)
        wait_until(lambda: record.outcome.outcome == ROLLED_BACK, TIMEOUT_S)
        assert bench.last_good() == "7"


def test_a_change_of_an_idle_model_whose_loads_fail_leaves_it_idle(
    bench: Bench, counted: CountedBackend
) -> None:
    bench.changed("m", IDLE, "7")
    unload_idle(bench)
    counted.fails["m"] = InternalError("its device is gone")
    bench.changed("m", IDLE, "8")
    assert bench.entry().is_idle
    assert "its device is gone" in bench.entry().reason
    counted.fails.clear()
    assert (bench.ask("m"), bench.last_good()) == (7, "7")


def test_a_change_of_an_idle_model_that_cannot_be_woken_serves_without_a_canary(
    bench: Bench,
) -> None:
    bench.changed("m", IDLE, "7")
    unload_idle(bench)
    copy = bench.table.get("m").serving_copy
    assert copy is not None
    number = copy.directory / "1" / "add"
    number.parent.chmod(0o700)
    number.unlink()
    number.write_text("-1")
    bench.changed("m", IDLE, "8")
    assert bench.table.get("m").canary is None
    assert (bench.ask("m"), bench.last_good()) == (8, "8")


def test_files_that_are_only_copied_again_leave_a_model_idle(
    bench: Bench, counted: CountedBackend
) -> None:
    bench.changed("m", IDLE, "7")
    unload_idle(bench)
    bench.changed("m", IDLE, "7")
    assert bench.entry().is_idle
    assert counted.loads["m"] == 1
    assert bench.table.get("m").outcome.outcome == GOOD


def test_an_idle_model_that_is_taken_away_is_gone(bench: Bench) -> None:
    bench.changed("m", IDLE, "7")
    unload_idle(bench)
    bench.carry_out(Change("m", None))
    assert bench.store.last_good() == {}
    with pytest.raises(NotFound):
        bench.ask("m")


def test_what_is_staged_again_before_its_rollback_is_not_loaded_again(
    bench: Bench, counted: CountedBackend
) -> None:
    bench.changed("m", COUNTED, "7")
    bench.changed("m", COUNTED, "8")
    begun, model_spec = counted.loads["m"], bench.table.serving_spec("m")
    assert model_spec is not None

    def changes() -> Iterator[Change]:
        yield Change("m", scan_model(bench.repository, "m"))
        assert bench.loader.lifecycle.roll_back(model_spec, "slow")

    assert not bench.updates.carry_out(changes())
    assert bench.updates.wait_idle(TIMEOUT_S)
    assert (counted.loads["m"], bench.ask("m")) == (begun, 7)
    bench.changed("e", ENSEMBLE, "")
    assert (counted.loads["m"], bench.ask("e")) == (begun, 7)


def test_the_quarantine_is_on_the_disk_before_anybody_can_know_of_the_rollback(
    bench: Bench, counted: CountedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a process that is killed at any moment never serves it again after that."""
    bench.changed("m", COUNTED, "7")
    bench.changed("m", COUNTED, "8")
    table = bench.table
    bad, publish = table.get("m").serving_copy, table.publish
    assert bad is not None
    known: list[object] = []

    def publish_and_look(names: Collection[str]) -> None:
        state = (bench.store.directory / "state.json").read_bytes()
        known.append(bad.digest.encode() in state)
        known.append(table.get("m").outcome == (ROLLED_BACK, bad.digest, "slow"))
        publish(names)

    monkeypatch.setattr(table, "publish", publish_and_look)
    # An ensemble that is read between the rollback and its report reads the predecessor.
    reports = table.commit

    def commit_later() -> None:
        monkeypatch.setattr(table, "commit", reports)
        bench.changed("e", ENSEMBLE, "")

    monkeypatch.setattr(table, "commit", commit_later)
    begun = counted.loads["m"]
    model_spec = table.serving_spec("m")
    assert model_spec is not None
    assert bench.loader.lifecycle.roll_back(model_spec, "slow")
    assert (counted.loads["m"], bench.ask("e")) == (begun, 7)
    assert known
    assert all(known)
    assert bench.ask("m") == 7
    assert bench.store.quarantined(bad.digest) == "rolled back: slow"


def test_a_member_that_is_removed_while_its_ensemble_is_read_does_not_serve(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.changed("m", COUNTED, "7")
    forgotten, begin = threading.Event(), bench.loader.lifecycle.begin_load
    monkeypatch.setattr(bench.store, "forget", lambda _name: forgotten.set())

    def begin_late(*arguments: Any) -> Any:
        if not forgotten.is_set():
            assert not bench.updates.carry_out([Change("m", None)])
            assert forgotten.wait(TIMEOUT_S)
        return begin(*arguments)

    monkeypatch.setattr(bench.loader.lifecycle, "begin_load", begin_late)
    bench.changed("e", ENSEMBLE, "")
    table = bench.table
    assert (table.serving_spec("m"), table.serving_spec("e")) == (None, None)
    bench.changed("m", COUNTED, "8")
    assert bench.ask("e") == 8


def test_what_cannot_be_rolled_back_is_on_trial_no_more_and_not_good(bench: Bench) -> None:
    bench.changed("m", COUNTED, "7")
    bench.changed("m", f'{COUNTED} output {{ name: "c" data_type: TYPE_FP32 dims: 1 }}', "8")
    bench.changed("e", ENSEMBLE.replace('key: "b"', 'key: "c"'), "")
    record = bench.table.get("m")
    assert record.outcome.outcome == ON_TRIAL
    assert record.spec is not None
    assert not bench.loader.lifecycle.roll_back(record.spec, "slow")
    bench.table.commit()
    assert record.outcome.outcome == WAITS
    assert record.outcome.reason.startswith("failed its canary: slow; cannot be rolled back: ")
    assert bench.last_good() == "7"


def test_an_ensemble_whose_canary_ended_with_its_member_is_kept_once_it_serves_again(
    bench: Bench,
) -> None:
    bench.changed("m", COUNTED, "7")
    bench.changed("e", ENSEMBLE, "")
    bench.changed("e", ENSEMBLE + " max_batch_size: 0 version_policy { all {} }", "")
    record = bench.table.get("e")
    assert record.outcome.outcome == ON_TRIAL
    bench.carry_out(Change("m", None))
    bench.changed("m", COUNTED, "7")
    assert bench.ask("e") == 7
    assert record.outcome.outcome == GOOD
    assert bench.store.last_good()["e"].digest == record.outcome.digest


def test_an_ensemble_that_comes_later_uses_what_serves_and_not_what_failed(
    bench: Bench, counted: CountedBackend
) -> None:
    bench.changed("m", COUNTED, "7")
    bench.changed("m", COUNTED, "-1")
    begun = counted.loads["m"]
    bench.changed("e", ENSEMBLE, "")
    # Nor is that tried again for it, nor forgotten.
    assert counted.loads["m"] == begun
    assert bench.ask("e") == 7
    entries = bench.table.registry.snapshot.index(only_ready=True)
    assert ["SystemExit" in entry.reason for entry in entries] == [False, True]
