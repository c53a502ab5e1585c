"""The demo shows lanes arriving, to people and to pipes, and ends when it was told to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import cv2

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 60.0


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edge_server", "demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_it_ends_after_n_frames_and_leaves_a_picture(tmp_path: Path) -> None:
    done = demo(tmp_path, "--frames", "20")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()[1:-1]
    assert head.split() == [
        "camera",
        "frames",
        "fps",
        "age",
        "ms",
        "infer",
        "ms",
        "lanes",
        "dropped",
    ]
    assert rows[-1].split()[:2] == ["road", "20"]
    assert cv2.imread(str(tmp_path / "lanes.png")).shape == (720, 1280, 3)


def test_json_is_one_message_a_frame_with_its_lanes(tmp_path: Path) -> None:
    done = demo(tmp_path, "--frames", "12", "--json", "--source", "synthetic://road?seed=3&fps=20")
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(messages) == 12
    assert [m["seq"] for m in messages] == sorted({m["seq"] for m in messages})
    assert all(m["schema"] == "edge.lanes/1" for m in messages)
    assert max(len(m["lanes"]) for m in messages) >= 2


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edge_server", "demo", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert "Traceback" not in running.stderr.read()
        assert running.wait(PATIENCE_S) == 0


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = demo(tmp_path, "--source", "nowhere.mp4")
    assert done.returncode == 69
    assert "nowhere.mp4: no such file or folder" in done.stderr
