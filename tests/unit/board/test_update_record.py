"""The record of the last update is read by versions before and after the one that wrote it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from edge_server.board.update import RecordFile, UpdateRecord
from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

COMMITTED = UpdateRecord("committed", "B", "A", "B", "1.0", "kept", engine="rauc", changed_s=7)


def test_what_was_written_is_read_by_this_process_and_the_next(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    assert file.read() == UpdateRecord()
    file.write(COMMITTED)
    assert file.read() == RecordFile(tmp_path).read() == COMMITTED
    assert [path.name for path in file.path.parent.iterdir()] == ["record.json"]


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.write(COMMITTED)
    later = {**json.loads(file.path.read_text()), "signed_by": "x", "state": "paused"}
    file.path.write_text(json.dumps(later))
    assert (file.read().state, file.read().target) == ("paused", "B")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": 3}', '{"format": 2}', '{"state": "\\ud800"}', "[" * 9999]
)
def test_what_cannot_be_read_counts_as_nothing_is_logged_once_and_stays(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(tmp_path)
    file.write(COMMITTED)
    file.path.write_text(text)
    for _ in range(3):
        assert file.read() == UpdateRecord()
    assert len(caplog.records) == 1
    assert file.path.read_text() == text


def test_a_link_that_the_daemon_may_have_put_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "update").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="no directory of this user"):
        RecordFile(tmp_path).write(COMMITTED)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_data_partition_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        RecordFile(tmp_path / "unmounted").write(COMMITTED)
