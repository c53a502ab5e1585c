"""After a death or damage the store serves the last good copies, and takes no bad one again."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import pytest
from unit.repository.stores import text

from edge_server.errors import (
    AlreadyRunning,
    InternalError,
    ModelConfigError,
    ModelLoadError,
    SettingsError,
)
from edge_server.repository.store import ModelStore

if TYPE_CHECKING:
    from pathlib import Path

    from unit.repository.stores import Open, Write


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.chmod(0o644)
    path.write_bytes(content)


def test_the_second_to_open_it_is_refused(reopened: Open, tmp_path: Path) -> None:
    store = reopened()
    with pytest.raises(AlreadyRunning, match=r"another daemon keeps .*repository\.store"):
        ModelStore(tmp_path / "store")
    store.close()
    store.close()
    ModelStore(tmp_path / "store").close()


def test_a_directory_that_is_not_its_own_is_refused_and_left_alone(
    write: Write, repository: Path, tmp_path: Path
) -> None:
    write({"a": b"x"})
    with pytest.raises(SettingsError, match=r"holds something else \(m\); choose an empty"):
        ModelStore(repository)
    assert [entry.name for entry in repository.iterdir()] == ["m"]
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(SettingsError, match="others could put models there; chmod go-w it"):
        ModelStore(open_to_all)
    with pytest.raises(SettingsError, match="a: File exists; give it a directory that"):
        ModelStore(repository / "m/a")


def test_what_a_dead_process_left_half_done_is_cleared_away(
    reopened: Open, write: Write, tmp_path: Path
) -> None:
    store = reopened()
    store.stage(write({"a": b"not served yet"}))
    (tmp_path / "store/incoming/half/m").mkdir(parents=True)
    (tmp_path / "store/incoming/half/m").chmod(0o555)
    reopened()
    assert not list((tmp_path / "store/copies").iterdir())
    assert not list((tmp_path / "store/incoming").iterdir())


def test_a_second_death_in_a_row_quarantines(
    reopened: Open, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopened()
    good = store.stage(write({"a": b"good"}))
    store.commit(good)
    staged = store.stage(write({"a": b"deadly"}))

    def load_to_death() -> ModelStore:
        with store.loading(staged):
            return reopened(died=True)

    assert not store.suspected(staged.digest)
    store = load_to_death()
    assert store.suspected(staged.digest)
    assert store.quarantined(staged.digest) == ""
    with store.loading(staged):
        pass
    assert not store.suspected(staged.digest)
    store = load_to_death()
    with pytest.raises(ModelConfigError), store.loading(staged):
        raise ModelConfigError("no deadly one, this time")
    assert store.suspected(staged.digest)
    caplog.clear()
    store = load_to_death()
    reason = store.quarantined(staged.digest)
    assert reason == (
        "the daemon died 2 times in a row while this was loaded; it is not tried again until the "
        "files change"
    )
    assert caplog.messages == [
        f"model m: the process died while it was loaded ({staged.digest})",
        f"model m: quarantined: {reason}",
    ]
    assert store.last_good() == {"m": good}
    assert store.quarantined(store.stage(write({"a": b"mended"})).digest) == ""
    assert store.quarantined(store.stage(write({"a": b"deadly"})).digest) == reason
    store.release(staged.digest)
    store = reopened()
    assert store.quarantined(staged.digest) == ""
    assert not store.suspected(staged.digest)


def test_a_board_that_loses_its_power_is_not_the_models_fault_until_it_never_comes_up(
    reopened: Open, write: Write
) -> None:
    store = reopened()
    staged = store.stage(write({"a": b"x"}))
    for boot in range(5):
        assert store.quarantined(staged.digest) == ""
        with store.loading(staged):
            store = reopened(boot=f"after {boot}", died=True)
    assert store.quarantined(staged.digest).startswith("the board went down 5 times in a row")


def test_a_daemon_that_is_stopped_while_it_loads_has_not_died(reopened: Open, write: Write) -> None:
    store = reopened()
    staged = store.stage(write({"a": b"x"}))
    with store.loading(staged):
        store = reopened()
    assert not store.suspected(staged.digest)


def test_a_closed_store_writes_no_more(reopened: Open, write: Write, tmp_path: Path) -> None:
    store = reopened()
    staged = store.stage(write({"a": b"x"}))
    store.commit(staged)
    store.close()
    state = (tmp_path / "store/state.json").read_bytes()
    store.quarantine(staged.digest, "too late")
    with pytest.raises(InternalError, match="it is closed"):
        store.commit(staged)
    assert (tmp_path / "store/state.json").read_bytes() == state


def test_what_is_quarantined_does_not_serve_again_but_what_it_replaced(
    reopened: Open, write: Write
) -> None:
    store = reopened()
    for content in "abc":
        staged = store.stage(write({"a": content.encode()}))
        store.commit(staged)
    store.quarantine(staged.digest, "it answers nonsense")
    store = reopened()
    assert store.quarantined(staged.digest) == "it answers nonsense"
    assert text(store.last_good()["m"]) == "b"
    store.release(staged.digest)
    assert text(reopened().last_good()["m"]) == "c"


def test_what_cannot_be_noted_holds_till_the_end(
    reopened: Open, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A load is not refused for want of a note of it; what serves next must be noted."""
    store = reopened()
    staged = store.stage(write({"a": b"x"}))
    blocked = tmp_path / "store/state.json.tmp"
    blocked.mkdir()
    with store.loading(staged):
        store.quarantine("0" * 64, "bad")
    assert store.quarantined("0" * 64) == "bad"
    assert "a restart will not know of it" in caplog.text
    with pytest.raises(InternalError, match="check the disk"):
        store.commit(staged)
    assert store.history("m") == []
    blocked.rmdir()
    store.commit(staged)
    store = reopened()
    assert store.last_good() == {"m": staged}
    assert store.quarantined("0" * 64) == "bad"


def test_a_damaged_copy_is_not_used_and_the_one_before_it_serves(
    reopened: Open, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopened()
    for content in (b"before", b"what serves"):
        staged = store.stage(write({"a": content}))
        store.commit(staged)
    flip(staged.directory / "a", 12)
    store = reopened()
    assert text(store.last_good()["m"]) == "before"
    assert caplog.messages == [
        f"model m: its copy {staged.directory.parent.name} is damaged: dropped"
    ]
    assert [text(kept) for kept in reopened().history("m")] == ["before"]


def test_a_damaged_copy_is_replaced_when_the_same_comes_again(reopened: Open, write: Write) -> None:
    store = reopened()
    staged = store.stage(write({"a": b"what serves"}))
    flip(staged.directory / "a", 12)
    again = store.stage(write({"a": b"what serves"}))
    assert (again.directory, text(again)) == (staged.directory, "what serves")


@pytest.mark.parametrize(
    ("damaged", "serves"),
    [
        (["state.json"], {"before", "what serves"}),
        (["state.before.json"], {"what serves"}),
        (["state.json", "state.before.json"], {"what serves"}),
    ],
)
def test_a_damaged_state_costs_a_step_and_never_a_start(
    reopened: Open, write: Write, tmp_path: Path, damaged: list[str], serves: set[str]
) -> None:
    store = reopened()
    for content in (b"before", b"what serves"):
        store.commit(store.stage(write({"a": content})))
    for name in damaged:
        flip(tmp_path / "store" / name, 300)
    store = reopened()
    assert text(store.last_good().get("m")) in serves
    store = reopened()
    assert text(store.last_good().get("m")) in serves
    store.commit(store.stage(write({"a": b"next"})))
    assert text(reopened().last_good()["m"]) == "next"


def test_a_lost_state_serves_no_copy_that_did_not_serve_last(
    reopened: Open, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = [tmp_path / "elsewhere"]
    store = reopened(repositories=elsewhere)
    store.commit(store.stage(write({"a": b"of another repository"}, "other")))
    store = reopened(repositories=[tmp_path])
    for content in (b"before", b"what serves", b"given up"):
        store.commit(bad := store.stage(write({"a": content})))
    store.quarantine(bad.digest, "the daemon died 2 times", "m")
    store = reopened(repositories=[tmp_path])
    never = [store.stage(write({"a": b"never served"})), store.stage(write({"a": b"x"}, "n"))]
    for name in ("state.json", "state.before.json"):
        (tmp_path / "store" / name).write_bytes(b"")
    caplog.clear()
    store = reopened(died=True, repositories=[tmp_path])
    assert {name: text(copy) for name, copy in store.last_good().items()} == {"m": "what serves"}
    assert [text(copy) for copy in store.history("m")] == ["what serves", "before"]
    assert "its state is lost: 1 models are loaded from the copies that served" in caplog.text
    assert len(never) == 2


def test_a_copy_that_cannot_be_read_now_is_there_when_it_can(
    reopened: Open, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopened()
    for content in (b"before", b"what serves"):
        store.commit(store.stage(write({"a": content})))
    store = reopened()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert store.last_good() == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "cannot be read now: not used" in caplog.text
    assert text(reopened().last_good()["m"]) == "what serves"


def test_a_copy_that_cannot_be_read_now_is_like_no_other(reopened: Open, write: Write) -> None:
    staged = reopened().stage(write({"a": b"x"}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    for most in (0, free + 1):  # no file, and one for the directory above the copy
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            with pytest.raises(ModelLoadError, match="Too many open files"):
                assert staged.fingerprint
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(staged.fingerprint) == 1


@pytest.mark.parametrize("damage", ["gone", "more", "less", "directory"])
def test_a_copy_that_lacks_a_file_or_has_one_more_is_not_used(
    reopened: Open, write: Write, damage: str
) -> None:
    store = reopened()
    staged = store.stage(write({"a": b"x", "2": None}))
    store.commit(staged)
    staged.directory.chmod(0o755)
    if damage == "gone":
        (staged.directory / "a").unlink()
    elif damage == "more":
        (staged.directory / "b").touch()
    elif damage == "less":
        os.truncate(staged.directory / "a", 0)
    else:
        (staged.directory / "2").rmdir()
    assert reopened().last_good() == {}
    assert reopened().history("m") == []


def test_a_copy_that_is_gone_is_not_kept(
    reopened: Open, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopened()
    for content in (b"a", b"b"):
        staged = store.stage(write({"a": content}))
        store.commit(staged)
    staged.directory.parent.rename(staged.directory.parent.with_name("elsewhere"))
    store = reopened()
    assert [text(kept) for kept in store.history("m")] == ["a"]
    assert "is gone" in caplog.text
