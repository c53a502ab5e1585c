"""`cameras probe` and `cameras list`: what they print of a source, and how they end."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.cameras.frame import Frame
from edge_server.cli.cameras import facts_of, measure, plugged_in
from edge_server.cli.main import run_command
from edge_server.errors import SourceError
from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
NV12 = Image.of_packed(
    PixelFormat.NV12,
    np.zeros((72, 64, 1), np.uint8),
    Colour(ColourMatrix.BT709, ColourRange.FULL),
)


class ScriptedSource:
    """A frame each 40 ms, captured 12 ms earlier; the fifth is missing; then `failure`."""

    corrupt = 3

    def __init__(self, failure: SourceError | None = None) -> None:
        self.now_ns = 0
        self._failure = failure
        self._captures = iter([40, 80, 120, 160, 240, 280])

    def read(self) -> Frame | None:
        at_ms = next(self._captures, None)
        if at_ms is None:
            if self._failure is not None:
                raise self._failure
            return None
        self.now_ns = at_ms * MS + 12 * MS
        return Frame(0, NV12, at_ms * MS, 0, "rtp")

    def close(self) -> None: ...


def test_what_a_source_gives_is_measured() -> None:
    source = ScriptedSource()
    measured = measure(source, 10, 0.5, lambda: source.now_ns)
    facts = facts_of(measured, source)
    assert facts == {
        "format": "nv12",
        "size": "64 x 48",
        "colour": "bt709, full range",
        "frames": 6,
        "fps": 20.83,
        "opened_after_s": 0.5,
        "clock": "rtp",
        "age_ms_median": 12.0,
        "age_ms_longest": 12.0,
        "gaps": 1,
        "damaged": 3,
        "ended": True,
    }


def test_a_source_that_fails_on_the_way_is_measured_until_then() -> None:
    failure = SourceError("cable out")
    source = ScriptedSource(failure)
    measured = measure(source, 10, 0.5, lambda: source.now_ns)
    assert measured.failure is failure
    assert len(measured.arrivals_ns) == 6


def test_the_time_is_up() -> None:
    source = ScriptedSource()
    assert len(measure(source, 0.1, 0.5, lambda: source.now_ns).arrivals_ns) == 3


def test_a_probe_writes_its_facts_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, picture = "synthetic://road?fps=0&width=320&height=180&frames=3", tmp_path / "seen.png"
    assert run_command(["cameras", "probe", uri, "--json", "--picture", str(picture)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["frames"], facts["size"], facts["ended"]) == (3, "320 x 180", True)
    assert facts["picture"] == str(picture)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["/dev/video77"], 69, "no such device; check the camera's plug"),
        (["rstp://cam/x"], 78, "did you mean 'rtsp'"),
        (["csi://0", "--reader", "opencv"], 78, "cannot"),
        (["rtsp://cam/x", "--credentials", "/nowhere"], 78, "/nowhere: cannot be read"),
        (["rtsp://eve:q8Zr@x@cam/x"], 78, "write @ as %40"),
        (
            ["front=rtsp://eve:q8Zr@cam/x"],
            78,
            ": a source has something else than a scheme before ://",
        ),
    ],
)
def test_a_probe_that_fails_ends_with_the_code_of_its_cause(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["cameras", "probe", *arguments]) == code
    error = capsys.readouterr().err
    assert text in error
    assert "q8Zr" not in error


def test_what_is_not_known_of_a_camera_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    uri = "synthetic://road?fps=0&width=64&height=64&frames=1"
    assert run_command(["cameras", "probe", uri]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["fps", "not known"] in lines
    assert ["ended", "yes"] in lines


def test_a_picture_of_another_format_is_refused_before_the_camera_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_command(["cameras", "probe", "synthetic://road", "--picture", "seen.gif"])
    assert "ends in .png or .jpg" in capsys.readouterr().err


def test_cameras_that_are_not_there_are_listed_as_none(tmp_path: Path) -> None:
    assert next(iter(plugged_in(Namespace(json=False), tmp_path))).startswith(
        f"no camera in {tmp_path}"
    )
    report = json.loads("".join(plugged_in(Namespace(json=True), tmp_path)))
    assert report["cameras"] == []
    assert "FFmpeg" in report["readers"]["opencv"]["backends"]


def test_a_device_that_is_no_camera_is_a_fault_of_the_list(tmp_path: Path) -> None:
    (tmp_path / "video0").touch()
    assert f"fault: {tmp_path}/video0: " in "\n".join(plugged_in(Namespace(json=False), tmp_path))


def test_a_camera_flag_without_a_name_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("rtsp://eve:q8Zr7@cam/x", "rtsp://eve:q8Zr7@cam/x?a=1"):
        assert run_command(["check", "--camera", text]) == 78
        assert "q8Zr7" not in (error := capsys.readouterr().err)
        assert "give it as NAME=URI" in error
