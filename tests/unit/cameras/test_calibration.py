"""Calibration files: what is read, what is refused and how, and what the id is made from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from edge_server.cameras.calibration import read_calibration, read_tables, text_of
from edge_server.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

LENS = """
[lens]
kind = "pinhole"
width = 1280
height = 720
fx = 1158.0
fy = 1153
cx = 670.0
cy = 386.0
distortion = [-0.24, -0.08, -0.001, 0.0001, 0.02]
"""
MOUNTING = """
[mounting]
height_m = 1.35
pitch_deg = 1.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "front.toml"


def test_a_file_is_a_camera_model(file: Path) -> None:
    file.write_text(LENS + MOUNTING)
    calibration = read_calibration(file)
    lens, mounting = calibration.model.lens, calibration.model.mounting
    assert (lens.fx, lens.fy, lens.distortion[0]) == (1158.0, 1153.0, -0.24)
    assert mounting.height_m == 1.35
    assert mounting.pitch_rad == pytest.approx(math.radians(1.5))
    assert mounting.roll_rad == mounting.x_m == 0.0


def test_the_id_is_that_of_the_content(file: Path) -> None:
    file.write_text(LENS + MOUNTING)
    first = read_calibration(file)
    file.write_text("# moved on Monday\n" + MOUNTING + LENS.replace("1158.0", "1158"))
    assert read_calibration(file) == first
    assert len(first.id) == 12
    file.write_text(LENS + MOUNTING.replace("1.35", "1.36"))
    assert read_calibration(file).id != first.id


def test_what_is_written_is_what_was_read(file: Path) -> None:
    file.write_text(LENS + MOUNTING)
    before = read_calibration(file)
    file.write_text(text_of(read_tables(file)))
    assert read_calibration(file) == before


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (LENS, r"has no \[mounting\].*calibrate mounting"),
        (MOUNTING, r"lens: is missing; edge-server calibrate"),
        (LENS.replace("fx = 1158.0", "") + MOUNTING, r"lens\.fx: is missing"),
        (LENS.replace("fx = 1158.0", "fx = 'wide'") + MOUNTING, r"lens\.fx: expected .*wide"),
        (LENS.replace("1158.0", "nan") + MOUNTING, r"lens\.fx: "),
        (LENS.replace("1158.0", "-5.0") + MOUNTING, r"lens\.fx: "),
        (LENS.replace("-0.24, ", "") + MOUNTING, r"distortion: kind pinhole has 5 values.*got 4"),
        (LENS.replace("pinhole", "fisheye") + MOUNTING, r"kind fisheye has 4 values.*got 5"),
        (LENS.replace("pinhole", "wide") + MOUNTING, r"lens\.kind: Invalid enum value 'wide'"),
        (LENS + MOUNTING.replace("height_m = 1.35", ""), r"mounting\.height_m: is missing"),
        (LENS + MOUNTING.replace("1.35", "0"), r"mounting\.height_m: "),
        (LENS + MOUNTING + "tilt_deg = 1\n", r"mounting\.tilt_deg: unknown key"),
        ("[lens", r"not TOML"),
        ("lens = 3", r"lens: expected"),
    ],
)
def test_a_damaged_file_is_refused_with_its_key(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=error) as raised:
        read_calibration(file)
    assert str(raised.value).startswith(f"{file}: ")


def test_an_absent_file_is_a_mistake_with_a_remedy(file: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"front\.toml: cannot be read: No such file.*calibrate"
    ):
        read_calibration(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_calibration(file)
