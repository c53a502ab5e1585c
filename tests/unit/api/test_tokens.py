"""Tokens open what their scopes say, and a file with a mistake opens nothing more."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.waiting import wait_until

from edge_server.api.access import Tokens
from edge_server.errors import PermissionDenied, SettingsError, Unauthenticated

if TYPE_CHECKING:
    from pathlib import Path

READ, BOTH = "r" * 16, "b" * 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who\nread {READ}\n\nread,control   {BOTH}  # the depot\n")
    path.chmod(0o600)
    return path


def _given(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


def test_a_call_needs_a_token_with_its_scope(file: Path) -> None:
    tokens = Tokens(str(file))
    assert tokens.refusal(None, []) is None
    assert tokens.refusal("read", _given(READ)) is None
    assert tokens.refusal("control", [("authorization", f"bearer {BOTH}".encode())]) is None
    assert isinstance(tokens.refusal("infer", _given(BOTH)), PermissionDenied)
    for wrong in ([], [("authorization", f"Basic {READ}")], _given("x" * 16), _given("")):
        assert isinstance(tokens.refusal("read", wrong), Unauthenticated)
    assert tokens.may_read(READ)
    assert not tokens.may_read("\udc80é")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("read short", "line 1 is not scopes"),
        (f"write {READ}", "line 1 is not scopes"),
        (READ, "line 1 is not scopes"),
        (f"read {READ}\nread {READ}", "line 2 has a token for a second time"),
    ],
)
def test_a_mistake_is_named_and_quotes_no_token(file: Path, line: str, says: str) -> None:
    file.write_text(line)
    with pytest.raises(SettingsError, match=says) as caught:
        Tokens(str(file))
    assert READ not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(file: Path) -> None:
    file.chmod(0o644)
    with pytest.raises(SettingsError, match=r"mode 644\): chmod 600"):
        Tokens(str(file))
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        Tokens(f"{file}.not")


def test_a_pipe_in_its_place_makes_no_call_wait(file: Path) -> None:
    tokens = Tokens(str(file))
    assert tokens.may_read(READ)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert tokens.may_read(READ)  # as before
    with pytest.raises(SettingsError, match="is no file"):
        Tokens(str(file))


def test_a_file_that_changes_counts_at_once_unless_it_has_a_mistake(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(str(file))
    file.write_text(f"infer {READ}")
    os.utime(file, ns=(1, 1))
    assert tokens.scopes_of(READ) == {"infer"}
    assert not tokens.scopes_of(BOTH)
    file.write_text("nonsense")
    os.utime(file, ns=(2, 2))
    for _ in range(2):
        assert tokens.scopes_of(READ) == {"infer"}
    assert caplog.text.count("tokens stay as they were") == 1


@pytest.mark.parametrize("wrong", ["missing", "directory", "a line cut off"])
def test_a_wrong_file_in_its_place_leaves_the_tokens_as_they_were(
    file: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    tokens = Tokens(str(file))
    file.unlink()
    if wrong == "directory":
        file.mkdir()
    elif wrong == "a line cut off":
        file.write_text(f"read {READ}\nread,in")
        file.chmod(0o600)
    for _ in range(2):
        assert tokens.may_read(READ)
    assert caplog.text.count("tokens stay as they were") == 1


def test_an_empty_file_revokes_every_token(file: Path) -> None:
    tokens = Tokens(str(file))
    file.write_text("")
    assert not tokens.may_read(READ)


def test_a_change_counts_once_what_kept_it_from_being_read_has_passed(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens(str(file))
    file.write_text("")
    with monkeypatch.context() as without_descriptors:

        def refuse(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        without_descriptors.setattr(os, "open", refuse)
        for _ in range(2):
            assert tokens.may_read(READ)
    assert caplog.text.count("tokens stay as they were") == 1
    assert not tokens.may_read(READ)


def test_a_copy_that_keeps_size_and_time_counts(file: Path) -> None:
    tokens = Tokens(str(file))
    before = file.stat()

    def copied() -> bool:
        file.write_text(file.read_text().replace(READ, "R" * len(READ)))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return file.stat().st_ctime_ns != before.st_ctime_ns  # the clock of files has ticks

    wait_until(copied)
    assert not tokens.may_read(READ)
