"""EventLog: ids in order across restarts, within a bound, whatever the disk does.

The worker's tick is called by the tests: no thread runs.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_server.errors import SettingsError, Unavailable
from edge_server.pipeline import event_log
from edge_server.pipeline.event_log import Event, EventFile, EventLog
from edge_server.process.disk import lock_file

# What a damaged file may have held beyond its readable events.
LOST = 100_000


def event(cause: str = "left") -> Event:
    return Event("lane_departure", "begin", cause, "", 1, 2, camera="front", frame_id=7)


def tick(events: EventLog, now: float = 0.0) -> None:
    # With something to write it does not wait.
    events._tick(now)


def opened_again(events: EventLog, tmp_path: Path) -> EventLog:
    """Return the log of a daemon that starts after the first one was killed: it ended nothing."""
    assert events._file is not None
    events._file.close()
    return EventLog(tmp_path / "events.db", kept=events._kept)


def causes(events: EventLog, after: int = 0) -> list[str]:
    return [each.cause for each in events.after(after)]


def add(events: EventLog, *texts: str, now: float = 0.0) -> None:
    for text in texts:
        events.put(event(text))
    tick(events, now)


def test_events_have_ids_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "a", "b")
    add(events, "c")
    assert [(each.id, each.cause) for each in events.after(0)] == [(1, "a"), (2, "b"), (3, "c")]
    assert causes(events, after=2) == ["c"]
    assert events.newest == 3


def test_an_end_names_its_begin_though_both_arrive_at_once() -> None:
    events = EventLog()
    begin = events.put(event())
    events.put(event("returned"), ends=begin)
    tick(events)
    assert [each.begin_id for each in events.after(0)] == [0, 1]


def test_events_and_their_readers_survive_a_kill(tmp_path: Path) -> None:
    first = EventLog(tmp_path / "events.db")
    add(first, "a", "b")
    first.acknowledge("mqtt", 1)
    add(first, "c")
    second = opened_again(first, tmp_path)
    assert causes(second) == ["a", "b", "c"]
    assert second.acknowledged("mqtt") == 1
    assert second.acknowledged("other") == 0
    add(second, "d")
    assert second.newest == 4


def test_the_oldest_are_forgotten_on_disk_too(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.db", kept=10)
    for n in range(35):
        add(events, str(n))
    assert causes(events) == [str(n) for n in range(25, 35)]
    assert causes(opened_again(events, tmp_path)) == [str(n) for n in range(25, 35)]


def test_a_crowd_that_no_disk_took_is_bounded_and_counted() -> None:
    events = EventLog(kept=10)
    for n in range(25):
        events.put(event(str(n)))
    tick(events)
    assert events.dropped == 15
    assert causes(events) == [str(n) for n in range(15, 25)]


def test_a_full_disk_delays_nothing_and_is_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "a")
    store = EventFile.store

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(EventFile, "store", full)
    add(events, "b")
    add(events, "c", now=1.0)
    assert causes(events) == ["a", "b", "c"]
    assert caplog.text.count("No space left") == 1
    monkeypatch.setattr(EventFile, "store", store)
    add(events, "d", now=2.0)
    assert causes(opened_again(events, tmp_path)) == ["a", "b", "c", "d"]


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.db").write_bytes(b"no database at all, " * 100)
    events = EventLog(tmp_path / "events.db")
    add(events, "a")
    assert events.newest > time.time(), "no reader has had so great an id"
    assert "is damaged" in caplog.text
    assert len(list(tmp_path.glob("events.db.damaged-*"))) == 1
    assert causes(opened_again(events, tmp_path)) == ["a"]


def test_of_the_damaged_files_the_newest_is_kept_and_ids_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "events.db.old"
    other.write_text("somebody else's")
    given = 0
    for at_s in (1_700_000_000, 1_600_000_000, 1_700_000_001):
        monkeypatch.setattr(event_log, "time", SimpleNamespace(time=lambda at_s=at_s: at_s))
        events = EventLog(tmp_path / "events.db")
        add(events, "a")
        assert events.newest > given
        given = events.newest
        events._end()
        with (tmp_path / "events.db").open("ab") as file:
            file.write(b"\xff\n")
        EventLog(tmp_path / "events.db")._end()
        aside = [path.name for path in tmp_path.glob("events.db.damaged-*")]
        assert aside == [f"events.db.damaged-{at_s}"]
    assert other.exists()


@pytest.mark.parametrize(
    "line",
    [b"\xff", b"torn", b"{", b"[1]", b'{"mqtt":-1}', b'{"mqtt":1e30}', b"[" * 10_000, b"\0" * 9],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_damaged_sets_the_file_aside(
    tmp_path: Path, line: bytes, end: bytes
) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "a")
    events.acknowledge("mqtt", 1)
    events._end()
    with (tmp_path / "events.db").open("ab") as file:
        file.write(line + end)
    again = EventLog(tmp_path / "events.db")
    assert (causes(again), again.acknowledged("mqtt"), again.id) == (["a"], 1, events.id)
    (aside,) = tmp_path.glob("events.db.damaged-*")
    assert aside.read_bytes().endswith(line + end)


def test_a_place_that_cannot_hold_the_file_is_an_error_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="events cannot be kept there"):
        EventLog(tmp_path / "file" / "events.db")


def test_a_place_that_may_be_mounted_later_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Unavailable, match="events cannot be kept there: Permission denied"):
        EventLog(tmp_path / "data" / "events.db")


def test_two_daemons_do_not_share_a_file(tmp_path: Path) -> None:
    first = EventLog(tmp_path / "events.db")
    add(first, "a")
    with pytest.raises(Unavailable, match="give this one another"):
        EventLog(tmp_path / "events.db")
    first._end()


def test_what_arrives_before_the_end_is_written(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.db")
    events.put(event("last"))
    events._end()
    assert causes(EventLog(tmp_path / "events.db")) == ["last"]


def test_a_text_of_any_bytes_and_length_is_an_event(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "model \udcff: " + "x" * 10**6)
    again = opened_again(events, tmp_path)
    (kept,) = again.after(0)
    assert kept.cause.startswith(r"model \xff")
    events.put(replace(event(), text="\udcff" + "x" * 10**6))
    tick(events)
    assert len(events.after(0)[-1].text) < 10_000


@pytest.mark.parametrize("other", ["nothing", "a copy", "no directory"])
def test_a_file_that_is_removed_or_replaced_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    path = tmp_path / "sub" / "events.db"
    events = EventLog(path)
    add(events, "a", "b")
    if other == "a copy":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").rename(path)
    elif other == "nothing":
        path.unlink()
    else:
        shutil.rmtree(path.parent)
    add(events, "c")
    assert caplog.text.count("was removed or replaced") == 1
    assert events._file is not None
    events._file.close()
    again = EventLog(path)
    assert causes(again) == ["a", "b", "c"]
    assert again.newest == 3


def _with_last(path: Path, old: str, new: str) -> None:
    """Change the text of the last event."""
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace(old, new)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_events_of_another_version_stay_and_keep_their_ids(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "a", "b")
    events._end()
    _with_last(tmp_path / "events.db", "lane_departure", "meteorite")
    again = EventLog(tmp_path / "events.db")
    assert causes(again) == ["a"]
    add(again, "c")
    assert [each.id for each in again.after(0)] == [1, 3]
    assert not list(tmp_path.glob("*.damaged-*"))


@pytest.mark.parametrize("id_", [2**63 - 1, -4, 1])
def test_damaged_ids_are_given_to_nobody(tmp_path: Path, id_: int) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "a", "b")
    events._end()
    _with_last(tmp_path / "events.db", '"id":2', f'"id":{id_}')
    again = EventLog(tmp_path / "events.db")
    add(again, "c")
    assert [each.cause for each in again.after(0)][-1] == "c"
    assert again.newest == 1 + LOST + 1
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def damage(path: Path, sector: int) -> None:
    with path.open("r+b") as file:
        file.seek(sector * 4096)
        file.write(bytes(range(256)) * 16)


@pytest.mark.parametrize("sector", range(12))
def test_events_survive_a_bad_sector_with_their_log_and_ids_go_on_above(
    tmp_path: Path, sector: int
) -> None:
    path = tmp_path / "events.db"
    events = EventLog(path)
    add(events, *map(str, range(300)))
    events._end()
    assert path.stat().st_size > 12 * 4096
    damage(path, sector)
    again = EventLog(path)
    assert len(list(tmp_path.glob("events.db.damaged-*"))) == 1
    survivors = again.after(0)
    assert len(survivors) >= 300 - 40, "those of other sectors"
    assert [each.cause for each in survivors] == [str(each.id - 1) for each in survivors]
    # Killed before there is an event: ids are given once all the same.
    again = opened_again(again, tmp_path)
    add(again, "new")
    assert again.newest == survivors[-1].id + LOST + 1
    assert {each.log for each in again.after(0)} == {again.id} == {events.id}
    assert causes(opened_again(again, tmp_path)) == [*(each.cause for each in survivors), "new"]


def test_a_sector_that_cannot_be_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, *map(str, range(300)))
    events._end()
    pread = os.pread

    def read(descriptor: int, size: int, start: int) -> bytes:
        if start == 4096 * 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, size, start)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", read)
        events = EventLog(tmp_path / "events.db")
    assert 260 < len(causes(events)) < 300
    add(events, "b")
    again = opened_again(events, tmp_path)
    assert causes(again) == causes(events)
    assert causes(again)[-1] == "b"
    assert len(list(tmp_path.glob("events.db.damaged-*"))) == 1


def test_a_kill_while_a_damaged_file_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.db"
    events = EventLog(path)
    add(events, "a", "b")
    events._end()
    with path.open("ab") as file:
        file.write(b"torn")

    def killed(*_: object) -> Path:
        raise KeyboardInterrupt

    opened, open_ = [], lock_file
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        patched.setattr(
            event_log, "lock_file", lambda *each: opened.append(open_(*each)) or opened[-1]
        )
        with pytest.raises(KeyboardInterrupt):
            EventLog(path)
    os.close(opened[0])
    again = EventLog(path)
    assert causes(again) == ["a", "b"]
    assert again.id == events.id
    add(again, "c")
    assert again.newest == 2 + LOST + 1


def test_a_full_disk_keeps_what_a_damaged_file_holds_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, "a")
    events._end()
    with (tmp_path / "events.db").open("ab") as file:
        file.write(b"torn")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(event_log, "_append", full)
        again = EventLog(tmp_path / "events.db")
        add(again, "b")
        assert causes(again) == ["a", "b"]
        assert again.id == events.id
    add(again, "c", now=9.0)
    assert causes(opened_again(again, tmp_path)) == ["a", "b", "c"]


def test_ids_need_no_clock_that_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = EventLog(tmp_path / "events.db")
    add(events, *map(str, range(300)))
    events._end()
    damage(tmp_path / "events.db", 5)
    monkeypatch.setattr(event_log, "time", SimpleNamespace(time=lambda: 0.0))
    again = EventLog(tmp_path / "events.db")
    add(again, "new")
    assert again.newest == 300 + LOST + 1


def test_a_new_log_has_another_identity(tmp_path: Path) -> None:
    assert len({EventLog().id, EventLog().id, EventLog(tmp_path / "events.db").id}) == 3


def test_ids_go_on_above_one_that_a_reader_has_had(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.db", kept=10)
    add(events, "a")
    events.continue_above(300)
    tick(events)
    again = opened_again(events, tmp_path)
    add(again, "b")
    assert [each.id for each in again.after(0)] == [1, 301]
    again.continue_above(5)
    add(again, "c")
    assert causes(opened_again(again, tmp_path)) == ["a", "b", "c"], "a gap is no event"


def test_a_damaged_id_hides_no_event_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    add(events, "a", "b", "c")
    events._end()
    path.write_bytes(path.read_bytes().replace(b'"id":1,', b'"id":9,', 1))
    again = EventLog(path)
    assert sorted(causes(again)) == ["a", "b", "c"]
    add(again, "d")
    assert again.newest > 9


def test_a_disk_that_is_full_at_the_start_costs_no_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(event_log, "lock_file", full)
        events = EventLog(tmp_path / "events.db")
        add(events, "a")
        assert causes(events) == ["a"]
    add(events, "b", now=9.0)
    assert causes(opened_again(events, tmp_path)) == ["a", "b"]


def test_a_stop_waits_for_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_STEP_S", 600.0)
    events = EventLog(tmp_path / "events.db")
    events.worker.start()
    events.stop()
    assert not events.worker.alive
