"""What is in quarantine is seen, and let out, whether a daemon runs or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.deliveries import push

from edge_server.cli.main import run_command
from edge_server.cli.models import local_listing, rows
from edge_server.errors import InternalError, NotFound
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore
from edge_server.repository.verdicts import quarantined_in, release

if TYPE_CHECKING:
    from pathlib import Path

    from support.deliveries import MakeModel

BAD, WORSE = "0" * 64, "01" + "f" * 62


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Of a daemon that has ended, with two digests of `m` in quarantine and one of `n`."""
    directory = tmp_path / "store"
    opened = ModelStore(directory)
    opened.quarantine(BAD, "rolled back: slow", "m")
    opened.quarantine(WORSE, "rolled back: nan", "m")
    opened.quarantine("2" * 64, "rolled back: slow", "n")
    opened.close()
    return directory


def in_quarantine(directory: Path) -> set[str]:
    """What a daemon that opens the store will not load."""
    opened = ModelStore(directory)
    opened.close()
    return {digest for digest in (BAD, WORSE, "2" * 64) if opened.quarantined(digest)}


def test_without_a_daemon_the_next_one_lets_it_out(store: Path) -> None:
    assert release(store, "m", timeout_s=0.0) == {BAD: False, WORSE: False}
    # What is noted is as good as done.
    assert [held.name for held in quarantined_in(store)] == ["n"]
    assert in_quarantine(store) == {"2" * 64}
    assert in_quarantine(store) == {"2" * 64}
    assert [held.name for held in quarantined_in(store)] == ["n"]


def test_a_daemon_that_runs_lets_it_out_at_its_next_look(store: Path) -> None:
    daemon = ModelStore(store)
    released = release(store, "m", BAD[:12], sleep=lambda _: daemon.release_noted())
    assert released == {BAD: True}
    daemon.close()
    assert not daemon.quarantined(BAD)
    assert in_quarantine(store) == {WORSE, "2" * 64}


def test_only_what_is_in_quarantine_under_that_name_is_let_out(store: Path) -> None:
    for name, digest in (("x", ""), ("n", BAD[:12]), ("m", "f")):
        with pytest.raises(NotFound, match=f"{name}: nothing.* is in quarantine in "):
            release(store, name, digest, timeout_s=0.0)
    assert in_quarantine(store) == {BAD, WORSE, "2" * 64}


def test_what_was_quarantined_without_a_name_is_let_out_by_its_digest(tmp_path: Path) -> None:
    """As by a daemon that noted none."""
    opened = ModelStore(tmp_path / "store")
    opened.quarantine(BAD, "old")
    opened.close()
    with pytest.raises(NotFound):
        release(tmp_path / "store", "m", timeout_s=0.0)
    assert release(tmp_path / "store", "m", "0000", timeout_s=0.0) == {BAD: False}


def test_a_store_that_knows_no_notes_is_an_error(store: Path) -> None:
    (store / "releases").rmdir()
    with pytest.raises(InternalError, match="no daemon of this version has opened it"):
        release(store, "m", timeout_s=0.0)


def test_where_there_is_no_store_nothing_is_in_quarantine(tmp_path: Path) -> None:
    assert quarantined_in(tmp_path / "none") == []


def test_what_else_lies_among_the_notes_is_left_alone(store: Path) -> None:
    (store / "releases" / "README").write_text("hello")
    assert in_quarantine(store) == {BAD, WORSE, "2" * 64}
    assert (store / "releases" / "README").exists()


def test_the_list_shows_what_is_in_quarantine_and_why(
    repository: Path, make_model: MakeModel, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(make_model("p"), repository)
    daemon = ModelStore(store)
    daemon.quarantine(
        daemon.stage(scan_model(repository, "p")).digest, "rolled back: 3 failed", "p"
    )
    daemon.close()
    (row,) = rows(local_listing(repository, store))
    assert row["quarantine"] == "rolled back: 3 failed"
    assert run_command(["models", "list", str(repository), "--store", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"p: {row['digest'][:12]} is in quarantine: rolled back: 3 failed" in lines
    assert f"m: {BAD[:12]} is in quarantine: rolled back: slow" in lines


@pytest.mark.parametrize("digest", ["", "xyz", "AB", "0" * 65])
def test_a_digest_is_hexadecimal(digest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["models", "release", "m", f"--digest={digest}"])
    assert caught.value.code == 2
    assert "a digest is hexadecimal" in capsys.readouterr().err
