"""A supply that fails in the middle of a write leaves a file that ends anywhere, or ends in zeros;
whoever reads it at the next start goes on.

In which order the calls come is the topic of tests/integration/test_store_crashes.py; here it is
what a disk may make of the data of the last one.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from edge_server.backends.tensorrt.plan_options import read_side_car, side_car_path
from edge_server.board.update import RecordFile, UpdateRecord
from edge_server.errors import ModelConfigError
from edge_server.inference.tracing import Sampler, TraceFile, TraceRule
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore
from edge_server.repository.store_state import StateFile
from edge_server.repository.verdicts import GOOD, Verdict, VerdictFile, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def torn(data: bytes, step: int = 1) -> Iterator[bytes]:
    """What may be there of `data` after a power cut: a begin of it, alone or filled with zeros."""
    for end in range(0, len(data), step):
        yield data[:end]
        yield data[:end] + bytes(len(data) - end)


@pytest.fixture
def stores(repository: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy of a store with two good versions of a model and one in quarantine."""
    base = tmp_path / "base"
    store = ModelStore(base, boot="1")
    (repository / "m/1").mkdir(parents=True)
    (repository / "m/config.pbtxt").write_text("")
    for content in ("old", "new"):
        (repository / "m/1/model.py").write_text(content)
        store.commit(store.stage(scan_model(repository, "m")))
    store.quarantine("1" * 64, "nonsense", "m")
    store.close()
    numbers = iter(range(10_000))

    def copy() -> Path:
        directory = tmp_path / f"store{next(numbers)}"
        shutil.copytree(base, directory)
        return directory

    return copy


def test_a_store_with_a_torn_state_serves_from_the_state_before(
    stores: Callable[[], Path],
) -> None:
    whole = (stores() / "state.json").read_bytes()
    for data in torn(whole, step=max(1, len(whole) // 60)):
        directory = stores()
        (directory / "state.json").write_bytes(data)
        store = ModelStore(directory, boot="1")
        try:
            good = store.last_good()["m"].directory
            assert (good / "1/model.py").read_text() in {"old", "new"}
        finally:
            store.close()
        shutil.rmtree(directory)


def test_no_torn_state_is_taken_for_a_whole_one(tmp_path: Path, stores: Callable[[], Path]) -> None:
    directory = stores()
    whole = (directory / "state.json").read_bytes()
    before = StateFile(directory).peek()
    (directory / "state.before.json").unlink()
    for data in torn(whole):
        (directory / "state.json").write_bytes(data)
        assert StateFile(directory).peek() in (before, type(before)())
        assert data == whole or StateFile(directory).peek() == type(before)()


def test_a_torn_copy_of_a_model_does_not_serve(stores: Callable[[], Path]) -> None:
    for data in torn(b"new"):
        directory = stores()
        state = StateFile(directory).peek()
        model = directory / "copies" / state.models["m"][0].key / "m/1/model.py"
        model.parent.chmod(0o700)
        model.chmod(0o600)
        model.write_bytes(data)
        store = ModelStore(directory, boot="1")
        try:
            good = store.last_good()["m"].directory
            assert (good / "1/model.py").read_text() == "old"
        finally:
            store.close()


def test_torn_verdicts_are_none(tmp_path: Path) -> None:
    VerdictFile(tmp_path, [tmp_path]).write(lambda: {"m": Verdict(GOOD, "1" * 64)})
    path = tmp_path / "verdicts.json"
    whole = path.read_bytes()
    for data in torn(whole):
        path.write_bytes(data)
        assert read_report(tmp_path) is None


def test_a_torn_side_car_is_built_again(tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    whole = json.dumps({"format": 1, "onnx_sha256": "1" * 64, "plan_sha256": "2" * 64}).encode()
    for data in torn(whole):
        side_car_path(plan).write_bytes(data)
        with pytest.raises(ModelConfigError, match="build the plan again"):
            read_side_car(plan)


def test_a_torn_trace_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sampler = Sampler(TraceRule(timestamps=True))
    file = TraceFile(str(path))
    for number in range(3):
        assert file.write(sampler, json.dumps({"id": number}).encode())
    for data in torn(path.read_bytes()):
        path.write_bytes(data)
        assert TraceFile(str(path)).write(sampler, b'{"id": 9}')
        assert json.loads(path.read_text()) == [{"id": 9}]


def test_a_torn_event_log_is_read_as_far_as_it_goes_or_set_aside(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    log = EventLog(tmp_path / "whole/events.db")
    for number in range(40):
        log.put(Event("camera", "instant", "lost", "x" * 200, number, number))
        log.acknowledge("mqtt", number)
        log._tick(0.0)
    log._end()
    whole = (tmp_path / "whole/events.db").read_bytes()
    counts = set()
    for number, data in enumerate(torn(whole, step=max(1, len(whole) // 40))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "events.db").write_bytes(data)
        log = EventLog(folder / "events.db")
        ids = [event.id for event in log.after(0)]
        assert ids == [*range(1, len(ids) + 1)], "none is made up, or comes twice"
        counts.add(len(ids))
        log.put(Event("camera", "instant", "lost", "", 0, 0))
        log._tick(0.0)
        assert log.newest > 40 or data.endswith(b"\n") or not data, "an id was given again"
        log._end()
        shutil.rmtree(folder)
    assert counts == {*range(41)}, "every one was torn"


def test_a_torn_update_record_is_no_reason_not_to_start(tmp_path: Path) -> None:
    RecordFile(tmp_path).path.parent.parent.mkdir(parents=True, exist_ok=True)
    RecordFile(tmp_path).write(UpdateRecord(state="committed", slot="A", version="1.2.3"))
    path = RecordFile(tmp_path).path
    for data in torn(path.read_bytes()):
        path.write_bytes(data)
        assert RecordFile(tmp_path).read().state == "none"
