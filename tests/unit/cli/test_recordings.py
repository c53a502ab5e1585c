"""`edge-server recordings`: files, what is in them, and their pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.mcap_drive import Drive, camera_jpeg

from edge_server.cli.main import run_command

if TYPE_CHECKING:
    from pathlib import Path

EX_UNAVAILABLE = 69


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    drive = Drive(tmp_path / "recordings")
    drive.frames(30, jpeg=True)
    drive.event()
    drive.stop()
    (path,) = drive.files()
    return path


def test_what_a_recording_has_and_whether_it_is_whole(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["recordings", "info", str(recording)]) == 0
    said = capsys.readouterr().out
    assert "device truck-7" in said
    assert "      30  /front/image\n" in said
    assert "       1  /events\n" in said
    assert said.endswith("whole\n")

    recording.write_bytes(recording.read_bytes()[:-3000])
    assert run_command(["recordings", "info", str(recording)]) == 0
    assert capsys.readouterr().out.endswith("breaks off: it ends in the middle\n")


def test_the_pictures_are_taken_out_as_they_are(recording: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    assert run_command(["recordings", "export", str(recording), str(folder)]) == 0
    pictures = sorted(folder.iterdir())
    assert len(pictures) == 30
    assert pictures[3].read_bytes() == camera_jpeg(3)


@pytest.mark.parametrize("verb", [["info"], ["export", "--camera=x"]])
def test_what_is_not_there_is_named(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tmp_path / "absent"
    more = [str(tmp_path / "pictures")] if verb[0] == "export" else []
    assert run_command(["recordings", *verb, str(absent), *more]) == EX_UNAVAILABLE
    assert f"{absent}: No such file or directory; " in capsys.readouterr().err


def test_a_name_from_a_foreign_recording_does_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = Drive(tmp_path / "recordings")
    for camera in ("a\x1b[2J", "b\nc"):
        drive.frames(3, jpeg=True, camera=camera)
    drive.stop()
    (path,) = drive.files()
    assert run_command(["recordings", "info", str(path)]) == 0
    assert run_command(["recordings", "export", str(path), str(tmp_path / "pictures")]) != 0
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said
    assert "/a\\x1b[2J/image" in said
    assert "choose one with --camera: a\\x1b[2J, b\\nc" in said


def test_the_recordings_of_the_settings_are_listed_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = tmp_path / "recordings", tmp_path / "config.toml"
    config.write_text(f'[recorder]\ndirectory = "{folder}"\n')
    listed = ["recordings", "list", "--config", str(config)]
    assert run_command(listed) == EX_UNAVAILABLE
    assert f"{folder}: No such file or directory; name the folder" in capsys.readouterr().err
    folder.mkdir()
    assert run_command(listed) == 0
    assert capsys.readouterr().out == f"{folder}: no recording\n"
    for number in (1, 2):
        (folder / f"0000000{number}-boot-20260101T000000Z-event.mcap").write_bytes(b"1234")
    assert run_command(listed) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["SIZE", "FILE"]
    assert [line.split("/")[-1][:8] for line in lines] == ["00000002", "00000001"]
