"""What a store remembers: bounded, newest first, and the same after it was on disk."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.repository.scan import SeenFile
from edge_server.repository.store_state import Deaths, KeptCopy, Load, StateFile, StoreState

if TYPE_CHECKING:
    from pathlib import Path

names = st.sampled_from(["m", "n", "laneDetect_model"])
digests = st.sampled_from([letter * 64 for letter in "abcdef"])
texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(0, 2**63 - 1)
seen = st.builds(SeenFile, texts, numbers, st.integers(-(2**63), 2**63 - 1), numbers, numbers)
copies = st.builds(KeptCopy, digests, digests, st.lists(seen, max_size=3).map(tuple), numbers)
states = st.builds(
    StoreState,
    st.dictionaries(names, st.lists(copies, min_size=1, max_size=3).map(tuple)),
    st.dictionaries(digests, texts),
    st.dictionaries(names, st.builds(Load, digests, texts)),
    st.dictionaries(digests, st.builds(Deaths, st.integers(0, 9), st.integers(0, 9))),
    numbers,
    st.dictionaries(digests, names),
    st.lists(texts, max_size=2).map(tuple),
    st.lists(st.builds(StoreState, turn=numbers), max_size=1).map(tuple),
)


@settings(deadline=None)
@given(st.lists(states, min_size=1, max_size=2))
def test_what_was_written_last_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[StoreState]
) -> None:
    directory = tmp_path_factory.mktemp("state")
    assert StateFile(directory).read() == StoreState()
    for state in written:
        StateFile(directory).write(state)
        assert StateFile(directory).read() == state


OLD = StoreState(turn=1)
NEW = StoreState({"m": (KeptCopy("a" * 64, "b" * 64, (SeenFile("1/x", 2, 3, 4),), 2),)}, turn=2)


@pytest.fixture
def written(tmp_path: Path) -> StateFile:
    file = StateFile(tmp_path)
    file.write(OLD)
    file.write(NEW)
    return file


def test_a_bit_that_flips_in_it_is_noticed(
    written: StateFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    whole = (tmp_path / "state.json").read_bytes()
    for bit in range(0, len(whole) * 8, 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "state.json").write_bytes(damaged)
        assert written.read() in (OLD, NEW)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"format":1,"sha256":"","state":{}}',
        b'{"format":1,"sha256":"","state":' + b"[" * 100_000,
        b'{"format":1,"sha256":"","state":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff",
    ],
)
def test_what_is_no_state_is_set_aside_and_logged(
    written: StateFile, tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state.json").write_bytes(data)
    assert written.read() == OLD
    assert "state.json is not used: " in caplog.text
    assert (tmp_path / "state.damaged").read_bytes() == data
    (tmp_path / "state.before.json").write_bytes(data)
    assert written.read() is None
    written.write(NEW)
    assert written.read() == NEW


def test_a_state_that_cannot_be_set_aside_is_logged_without_a_traceback(
    written: StateFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state.json").write_text("{")
    (tmp_path / "state.damaged" / "something").mkdir(parents=True)
    written.read()
    assert f"Is a directory; remove {tmp_path / 'state.damaged'}" in caplog.text
    assert "Traceback" not in caplog.text


def test_what_a_newer_one_wrote_is_kept_for_it(
    written: StateFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = msgspec.json.encode({"format": 2, "sha256": "0" * 64, "state": {"all": "new"}})
    (tmp_path / "state.json").write_bytes(newer)
    assert written.read() == OLD
    assert "it is of format 2, this is 1; kept as state.format-2" in caplog.text
    assert (tmp_path / "state.format-2").read_bytes() == newer


def test_what_cannot_even_be_set_aside_costs_no_start(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    (tmp_path / "state.damaged").touch()
    assert StateFile(tmp_path).read() is None


changes = st.one_of(
    st.tuples(st.just("commit"), names, digests),
    st.tuples(st.just("forget"), names, digests),
    st.tuples(st.just("drop"), names, digests),
)


@given(st.lists(changes, max_size=30))
def test_histories_are_what_served_newest_first(steps: list[tuple[str, str, str]]) -> None:
    state, expected = StoreState(), dict[str, list[str]]()
    for what, name, digest in steps:
        key = f"{name} {digest}"
        if what == "commit":
            state = state.committed(name, KeptCopy(digest, key, ()))
            older = [other for other in expected.get(name, []) if other != digest]
            expected[name] = [digest, *older][:3]
        elif what == "forget":
            state = state.forgotten(name)
            expected.pop(name, None)
        else:
            state = state.without({key})
            expected[name] = [other for other in expected.get(name, []) if other != digest]
    expected = {name: history for name, history in expected.items() if history}
    assert {n: [kept.digest for kept in h] for n, h in state.models.items()} == expected
    for history in state.models.values():
        model_locks = [kept.turn for kept in history]
        assert model_locks == sorted(model_locks, reverse=True)
        assert len(set(model_locks)) == len(model_locks)


def test_models_of_the_same_content_die_once() -> None:
    state = StoreState().began("m", "a", "1").began("n", "a", "1").interrupted("1")
    assert state.deaths == {"a": Deaths(crashes=1)}
    assert not state.loading
    assert not state.quarantined


def test_a_load_that_goes_well_makes_up_for_no_other() -> None:
    state = StoreState().began("m", "a", "1").began("n", "b", "1").interrupted("1")
    state = state.began("m", "a", "1").ended("m", loaded=True).ended("nobody", loaded=True)
    assert state.deaths == {"b": Deaths(crashes=1)}
