"""The small parts of the demo: what waits is bounded, and a picture is whole or an error."""

from __future__ import annotations

import json
import sys
import threading
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.waiting import TIMEOUT_S

from edge_server.cameras.calibration import read_tables
from edge_server.cameras.recordings import write_picture
from edge_server.cli.demo import (
    KEPT,
    Inbox,
    _calibration_file,
    _into_video,
    _played,
    _require_other_file,
    _show,
    free_name,
    no_lanes_text,
)
from edge_server.cli.tables import LaneTable, result_text
from edge_server.errors import SettingsError, SourceError
from edge_server.tools.road.scene import RoadScene
from edge_server.tools.road.variants import varied


def test_messages_that_nobody_takes_give_way_to_newer_ones() -> None:
    inbox = Inbox()
    for number in range(KEPT + 10):
        inbox.add(b"%d" % number)
    taken = [inbox.get_nowait() for _ in range(KEPT)]
    assert taken == [b"%d" % n for n in range(10, KEPT + 10)]
    assert inbox.empty()


@pytest.mark.parametrize(
    ("source", "lockstep", "video", "played"),
    [
        ("a b.mp4", False, False, "file:///here/a%20b.mp4?loop=true"),
        ("a b.mp4", True, False, "file:///here/a%20b.mp4?loop=false&fps=0"),
        ("a b.mp4", False, True, "file:///here/a%20b.mp4?loop=false&fps=0"),
        ("mcap:///x.mcap", True, False, "mcap:///x.mcap?fps=0"),
        ("mcap:///x.mcap?camera=front", False, True, "mcap:///x.mcap?camera=front&fps=0"),
        ("file:///x.mp4?fps=8", False, True, "file:///x.mp4?fps=8"),
        ("file:///x.mp4?fps=0", True, True, "file:///x.mp4?fps=0"),
        ("/dev/video0", False, True, "/dev/video0"),
        ("rtsp://host/main", False, True, "rtsp://host/main"),
    ],
)
def test_a_recording_is_played_in_lockstep_where_that_is_asked_for_or_a_video_is_made(
    source: str, lockstep: bool, video: bool, played: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "absolute", lambda path: Path("/here") / path)
    arguments = Namespace(lockstep=lockstep, video=Path("x.mp4") if video else None)
    assert _played(source, arguments) == played


def test_in_lockstep_no_message_gives_way_to_newer_ones() -> None:
    inbox = Inbox()
    adding = threading.Thread(
        target=lambda: [inbox.add(b"%d" % n, lockstep=True) for n in range(KEPT + 10)]
    )
    adding.start()
    assert [inbox.get(timeout=TIMEOUT_S) for _ in range(KEPT)] == [b"%d" % n for n in range(KEPT)]
    inbox.over = True
    adding.join(TIMEOUT_S)
    assert not adding.is_alive()


@pytest.mark.parametrize("conditions", ["", "rain,camera,nonsense"])
def test_a_drawn_road_is_calibrated_with_the_camera_that_its_conditions_make(
    conditions: str,
) -> None:
    known = [name for name in conditions.split(",") if name in ("rain", "camera")]
    camera = varied(RoadScene.for_camera(7), known, 7).camera
    with ExitStack() as running:
        file = _calibration_file(f"synthetic://road?seed=7&conditions={conditions}", running)
        assert file is not None
        tables = read_tables(file)
    assert tables.mounting is not None
    assert (tables.lens.fx, tables.lens.cy, tables.mounting.height_m) == pytest.approx(
        (camera.focal * 1280, camera.horizon * 720 - 0.5, camera.height_m)
    )


def test_a_picture_that_cannot_be_encoded_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lanes.nonsense"
    with pytest.raises(SourceError, match=r"lanes\.nonsense: cannot be encoded"):
        write_picture(path, np.zeros((4, 4, 3), np.uint8))
    assert not path.exists()


def test_a_picture_that_is_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be encoded"):
        write_picture(tmp_path / "lanes.png", np.zeros((0, 4, 3), np.uint8))


def test_a_picture_never_takes_the_place_of_another_file(tmp_path: Path) -> None:
    picture = tmp_path / "lanes.png"
    assert free_name(picture) == picture
    picture.write_text("somebody's")
    assert free_name(picture) == tmp_path / "lanes-2.png"
    (tmp_path / "lanes-2.png").symlink_to("nowhere")
    assert free_name(picture) == tmp_path / "lanes-3.png"


def test_a_video_never_takes_the_place_of_its_source(tmp_path: Path) -> None:
    clip, link = tmp_path / "drive.mp4", tmp_path / "link.mp4"
    _require_other_file(clip, f"file://{clip}")
    clip.touch()
    link.symlink_to(clip)
    for video in (clip, link):
        with pytest.raises(SettingsError, match="is the source itself; choose another name"):
            _require_other_file(video, f"file://{clip}?loop=false")
    _require_other_file(tmp_path / "lanes.mp4", f"file://{clip}")
    _require_other_file(clip, "synthetic://road")


def test_an_error_of_the_demo_is_not_covered_by_its_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = ExitStack()
    _into_video(tmp_path / "lanes.mp4", running, sys.stdout)
    trouble = SourceError("nowhere.mp4: no such file")
    assert running.__exit__(SourceError, trouble, None) is False
    assert "warning: " in capsys.readouterr().err
    _into_video(tmp_path / "lanes.mp4", running, sys.stdout)
    with pytest.raises(SourceError, match="there was no frame"):
        running.close()


def test_the_end_without_lanes_names_the_source_once() -> None:
    shown = "rtsp://cam/1"
    assert no_lanes_text(shown, "") == "no lanes arrived for 15 s from rtsp://cam/1"
    assert no_lanes_text(shown, "unavailable: rtsp://cam/1: refused").count(shown) == 1
    assert no_lanes_text(shown, "black: no light") == (
        "no lanes arrived for 15 s from rtsp://cam/1: black: no light"
    )


def message(status: str = "OK", *reasons: str, **more: Any) -> dict[str, Any]:
    return {
        "camera": "road",
        "status": f"FRAME_STATUS_{status}",
        "reasons": list(reasons),
        "time": {"age_us": 5000},
        "latency_us": {"infer": 7000},
        "lanes": [],
        "dropped": 1,
    } | more


def test_the_table_names_the_state_of_the_camera_and_each_change_of_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = LaneTable()
    table.add(message())
    table.add(message("INVALID", "stalled: no frame for 0.6 s", latency_us={}))
    table.add(message("INVALID", "age", "stalled: no frame for 1.6 s", latency_us={}))
    table.add(message())
    table.add(message("STALE", "age"))
    table.finish()
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[-1] == "state"
    assert [line for line in lines if not line[1].isdecimal()] == [
        ["road", "invalid:", "stalled:", "no", "frame", "for", "0.6", "s"],
        ["road", "ok"],
    ]
    # Messages without a frame are not counted as frames.
    assert [line[1] for line in lines if line[1].isdecimal()][-1] == "3"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"detections": []}, "nothing"),
        (
            {
                "detections": [
                    {
                        "box": {"x_min": 1.4, "y_min": 2.0, "x_max": 30.0, "y_max": 40.0},
                        "class_id": 0,
                        "label": "car",
                        "confidence": 0.912,
                        "ground": {"x_m": 23.42, "y_m": 0.1},
                    },
                    {
                        "box": {"x_min": 0, "y_min": 0, "x_max": 9, "y_max": 9},
                        "class_id": 7,
                        "label": "",
                        "confidence": 0.5,
                    },
                ]
            },
            "car 0.91 at 1,2,30,40, 23.4 m ahead; class 7 0.50 at 0,0,9,9",
        ),
        (
            {
                "segmentation": {
                    "columns": 4,
                    "rows": 1,
                    "run_classes": [0, 1],
                    "run_lengths": [3, 1],
                    "labels": ["background", "drivable"],
                }
            },
            "background 75%; drivable 25%",
        ),
        ({"classes": [{"label": "rain", "confidence": 0.7}]}, "rain 0.70"),
        ({"tensors": [{"name": "f", "shape": [8]}]}, "f [8]"),
        (
            {"status": "FRAME_STATUS_INVALID", "reasons": ["model_failed: class: 7"]},
            "model_failed: class: 7",
        ),
    ],
)
def test_what_a_network_has_found_is_a_line(found: dict[str, Any], text: str) -> None:
    message = {"camera": "road", "network": "n", "frame_id": 3, "status": "FRAME_STATUS_OK"}
    line = result_text({"reasons": ["dark"], **message, **found})
    assert line.split() == f"road 3 n: {text}".split()
    assert len(line) >= 72


def test_json_of_n_frames_is_n_lines(capsys: pytest.CaptureFixture[str]) -> None:
    inbox = Inbox()
    for status in ("INVALID", "OK", "INVALID", "OK", "OK"):
        inbox.add(msgspec.json.encode(message(status, reason_details=[])))
    how = {"source": "synthetic://road", "frames": 2, "serve": None, "json": True}
    _show(inbox, threading.Event(), Namespace(**how))
    shown = [json.loads(line)["status"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["FRAME_STATUS_OK"] * 2
