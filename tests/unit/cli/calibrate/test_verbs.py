"""`edge-server calibrate`: what is wrong with a command line, or a machine, is said in one line."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from edge_server.cameras.calibration import read_tables
from edge_server.cli.main import run_command

if TYPE_CHECKING:
    from pathlib import Path

LENS = (
    '[lens]\nkind = "pinhole"\nwidth = 640\nheight = 360\nfx = 500\nfy = 500\ncx = 320\ncy = 180\n'
    "distortion = [0, 0, 0, 0, 0]\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "front.toml"
    file.write_text(LENS)
    return file


@pytest.mark.parametrize(
    "words",
    [
        ["lens", "{file}"],
        ["lens", "{file}", "--fov", "170"],
        ["lens", "{file}", "--fov", "60", "--size", "1280"],
        ["mounting", "{file}", "--mark", "5,5"],
        ["mounting", "{file}", "--mark", "5,5=1"],
        ["mounting", "{file}", "--at", "3"],
        ["mounting", "{file}", "--hight", "3"],
        ["estimate", "{file}", "clip.mp4", "--lane-width", "-3"],
        ["estimate", "{file}", "clip.mp4", "--frames", "0"],
        ["show", "{file}", "clip.mp4"],
        ["intrinsics", "a.png", "--output", "f.toml"],
    ],
)
def test_a_wrong_flag_is_a_usage_error(file: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["calibrate", *(word.format(file=file) for word in words)])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["mounting", "{file}"], "give --height, or marks"),
        (["mounting", "{file}", "--height", "40"], "mounting: .*height_m"),
        (["mounting", "{file}", "--height", "1.4", "--pitch", "80"], "mounting: .*pitch_deg"),
        (["mounting", "{file}", "--mark", "5,5=1,1"], "1 marks on the ground; give 4"),
        (
            ["mounting", "{file}", "--mark", "5,5=1,1", "--yaw", "2"],
            "--yaw: follows from the marks",
        ),
        (["mounting", "{file}", "--board", "chessboard:9x6:0.1"], "--board needs --picture"),
        (["mounting", "absent.toml", "--height", "1"], "absent.toml: cannot be read"),
        (["show", "{file}", "x.png", "--output", "o.png"], r"has no \[mounting\]"),
        (["intrinsics", "--board", "chessboard:9x6:0.1", "--output", "f"], "give pictures"),
        (["intrinsics", "a.png", "--board", "chess", "--output", "f"], "board 'chess': write"),
    ],
)
def test_what_makes_no_calibration_is_said(
    file: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["calibrate", *(word.format(file=file) for word in words)]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(text, line), line
    assert file.read_text() == LENS


def test_given_numbers_go_over_those_of_the_file(file: Path) -> None:
    mounting = ["calibrate", "mounting", str(file)]
    assert run_command([*mounting, "--height", "1.4", "--pitch", "2", "--x", "-1.5"]) == 0
    assert run_command([*mounting, "--height", "1.5", "--yaw", "1"]) == 0
    text = file.read_text()
    for line in ("height_m = 1.5", "pitch_deg = 2.0", "yaw_deg = 1.0", "x_m = -1.5"):
        assert f"\n{line}\n" in text


def test_without_opencv_the_remedy_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "edge_server.tools.calibrate", raising=False)
    monkeypatch.delitem(sys.modules, "edge_server.tools.boards", raising=False)
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert run_command(["calibrate", "mounting", str(file), "--height", "1.4"]) == 78
    assert "the library cv2 is missing; " in capsys.readouterr().err


def test_a_rough_lens_keeps_the_mounting(file: Path) -> None:
    file.write_text(LENS + "[mounting]\nheight_m = 1.4\n")
    words = ["calibrate", "lens", str(file), "--fov", "90", "--size", "1000x500"]
    assert run_command(words) == 0
    tables = read_tables(file)
    assert (tables.lens.fx, tables.lens.cx, tables.lens.cy) == (pytest.approx(500), 499.5, 249.5)
    assert tables.mounting is not None
