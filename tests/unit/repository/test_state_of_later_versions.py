"""What a later version adds to the store's state is ignored; what served still serves from it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store whose model `m` is the last known good one, and that holds a quarantine."""
    model = tmp_path / "repository/m"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text("")
    (model / "1/model.py").write_text("good")
    store = ModelStore(tmp_path / "store", boot="1")
    store.commit(store.stage(scan_model(model.parent, "m")))
    store.quarantine("1" * 64, "long ago")
    store.close()
    return tmp_path / "store"


def add_fields(value: Any) -> Any:
    """Give each object of the state a field that this version does not have."""
    if isinstance(value, list):
        return [add_fields(each) for each in value]
    if not isinstance(value, dict):
        return value
    # Names of models and digests are keys, too: there an added one would be a model.
    is_struct = "models" in value or "digest" in value or "key" in value or "turn" in value
    added = {"of_a_later_version": {"a": [1]}} if is_struct else {}
    return {name: add_fields(each) for name, each in value.items()} | added


def test_added_fields_are_ignored_and_the_next_write_is_readable(store: Path) -> None:
    path = store / "state.json"
    envelope = json.loads(path.read_text())
    state = json.dumps(add_fields(envelope["state"]))
    assert state.count("of_a_later_version") >= 2
    sha256 = hashlib.sha256(state.encode()).hexdigest()
    path.write_text(f'{{"format": 1, "later": 7, "sha256": "{sha256}", "state": {state}}}')
    for _ in range(2):
        opened = ModelStore(store, boot="1")
        assert (opened.last_good()["m"].directory / "1/model.py").read_text() == "good"
        assert opened.quarantined("1" * 64) == "long ago"
        opened.quarantine("2" * 64, "again")
        opened.close()
    assert not list(store.glob("*.damaged"))
