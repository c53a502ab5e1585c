"""The demo shows lanes arriving, to people and to pipes, and ends when it was told to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
from support.verb import run_verb
from support.waiting import wait_until

if TYPE_CHECKING:
    from support.live_cameras.started import LiveCameras

PATIENCE_S = 60.0
RIGHT = "q8Zr-right"


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_verb("demo", *arguments, cwd=folder)


def demo_after(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in a process that ran `code` before it."""
    run = f"{code}; from edge_server.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", run, "demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_it_ends_after_n_frames_and_leaves_a_picture(tmp_path: Path) -> None:
    done = demo(tmp_path, "--frames", "20", "--video", "lanes.mp4")
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()[1:-2]
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
        "state",
    ]
    assert rows[-1].split()[:2] == ["road", "20"]
    assert cv2.imread(str(tmp_path / "lanes.png")).shape == (720, 1280, 3)
    frames = re.search(rf"(\d+) frames are in {tmp_path}/lanes.mp4", done.stdout)
    assert frames is not None
    video = cv2.VideoCapture(str(tmp_path / "lanes.mp4"))
    # Each frame stands until the next one, in steps of 1/30 s.
    assert video.get(cv2.CAP_PROP_FRAME_COUNT) >= int(frames[1]) > 0
    picture = video.read()[1]
    assert picture.shape == (720, 1280, 3)


def test_json_is_one_message_a_frame_with_its_lanes(tmp_path: Path) -> None:
    done = demo(tmp_path, "--frames", "12", "--json", "--source", "synthetic://road?seed=3&fps=20")
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(messages) == 12
    assert [m["seq"] for m in messages] == sorted({m["seq"] for m in messages})
    assert all(m["schema"] == "edge.lanes/1" for m in messages)
    assert max(len(m["lanes"]) for m in messages) >= 2


def test_another_network_is_shown_beside_the_lanes(tmp_path: Path) -> None:
    done = demo(tmp_path, "--frames", "25", "--json", "--network", "vehicles")
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    found = [each for each in messages if "network" in each]
    assert len(messages) - len(found) == 25
    assert {each["network"] for each in found} == {"vehicles"}
    assert {each["frame_id"] for each in found} <= {
        each["frame_id"] for each in messages if "network" not in each
    }
    vehicles = [vehicle for each in found for vehicle in each["detections"]]
    assert {vehicle["label"] for vehicle in vehicles} <= {"car", "lorry"}
    assert any(10 < vehicle["ground"]["x_m"] < 100 for vehicle in vehicles if "ground" in vehicle)
    lost = demo(tmp_path, "--network", "pedestrians")
    assert lost.returncode == 69
    assert "unknown model: 'pedestrians' is not found; put it into a repository" in lost.stderr


def test_a_clip_in_lockstep_loses_no_frame_and_its_video_has_the_clips_pace(
    tmp_path: Path,
) -> None:
    clip = cv2.VideoWriter(
        str(tmp_path / "drive.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 40, (320, 180)
    )
    for number in range(60):
        clip.write(np.full((180, 320, 3), number, np.uint8))
    clip.release()
    done = demo(tmp_path, "--source", "drive.mp4", "--json", "--video", "lanes.mp4")
    assert done.returncode == 0, done.stderr
    *messages, ended = map(json.loads, done.stdout.splitlines())
    # It is grey: whatever is said of its pictures, there is a message for each.
    assert [message["frame_id"] for message in messages] == list(range(60))
    times = [int(message["time"]["capture_mono_ns"]) for message in messages]
    assert {later - time for time, later in pairwise(times)} == {25_000_000}
    assert {message["time"]["age_us"] for message in messages} == {0}
    assert {message["dropped"] for message in messages} == {0}
    assert ended["reason_details"] == [
        {"code": "REASON_CODE_ENDED", "text": "it ended after 60 frames"}
    ]
    assert f"60 frames are in {tmp_path}/lanes.mp4" in done.stderr
    video = cv2.VideoCapture(str(tmp_path / "lanes.mp4"))
    assert video.get(cv2.CAP_PROP_FRAME_COUNT) == 60
    assert video.get(cv2.CAP_PROP_FPS) == 40


def test_a_camera_has_no_lockstep_nor_has_a_recording_with_a_rate(tmp_path: Path) -> None:
    live = demo(tmp_path, "--lockstep", "--source", "/dev/video63")
    assert live.returncode == 78
    assert "--lockstep: /dev/video63 is a camera, which does not wait" in live.stderr
    paced = demo(tmp_path, "--lockstep", "--source", "synthetic://road?fps=8")
    assert paced.returncode == 78
    assert "--lockstep: synthetic://road has a rate, fps=8; leave one out" in paced.stderr


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


def test_a_camera_with_a_password_is_shown_without_it(
    tmp_path: Path, live_cameras: LiveCameras
) -> None:
    camera = live_cameras.rtsp(user="driver", password=RIGHT)
    done = demo(tmp_path, "--frames", "5", "--source", camera.uri())
    assert done.returncode == 0, done.stderr
    assert f"rtsp://127.0.0.1:{camera.port}/camera; gRPC on" in done.stdout
    assert done.stdout.splitlines()[-2].split()[-1] == "ok"
    assert RIGHT not in done.stdout + done.stderr


def test_a_camera_that_is_not_there_is_named_with_the_next_step(tmp_path: Path) -> None:
    sooner = "from edge_server.cli import demo; demo._TIMEOUT_S = 3.0"
    done = demo_after(sooner, tmp_path, "--frames", "5", "--source", "/dev/video77")
    assert done.returncode == 69
    assert "no lanes arrived for 3 s: unavailable: /dev/video77: no such device; " in done.stderr
    assert "check the camera's plug and cable" in done.stderr


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing_behind(
    tmp_path: Path, begun: bool, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "edge_server", "demo", "--json"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        if begun:
            running.stdout.readline()
        else:
            wait_until_it_starts(running.pid)
        running.send_signal(number)
        said = running.communicate(timeout=PATIENCE_S)[1]
    assert running.returncode == 0, said
    assert "Traceback" not in said
    assert list(temporary.glob("edge-server-demo-*")) == []
    assert processes_with(str(temporary)) == []


def wait_until_it_starts(pid: int) -> None:
    """Returns when the process has a handler for SIGTERM, long before lanes arrive."""

    def has_a_handler() -> bool:
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(
        has_a_handler, PATIENCE_S, every_s=0.005, otherwise="it never began to listen for signals"
    )


def processes_with(text: str) -> list[str]:
    """Command lines that have `text` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_a_picture_that_cannot_be_written_is_a_warning() -> None:
    # Nobody makes files there, root neither.
    done = demo(Path("/proc"), "--frames", "2")
    assert done.returncode == 0, done.stderr
    assert "warning: lanes.png: cannot be written: No such file" in done.stderr


def test_a_picture_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "lanes.png").write_text("somebody's")
    done = demo(tmp_path, "--frames", "2")
    assert done.returncode == 0, done.stderr
    assert f"is in {tmp_path}/lanes-2.png" in done.stdout
    assert (tmp_path / "lanes.png").read_text() == "somebody's"


def test_without_opencv_it_names_what_is_missing(tmp_path: Path) -> None:
    done = demo_after("import sys; sys.modules['cv2'] = None", tmp_path, "--frames", "2")
    assert done.returncode in {69, 78}
    assert "cv2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("address", "code", "says"),
    [
        ("127.0.0.1:1", 69, "MQTT broker 127.0.0.1:1 cannot be reached: Connection refused"),
        ("a..b", 69, "MQTT broker a..b:1883 cannot be reached: "),
    ],
)
def test_a_broker_that_is_not_there_is_named(
    tmp_path: Path, address: str, code: int, says: str
) -> None:
    done = demo(tmp_path, "--mqtt", address)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_broker_seq_counts_every_message(tmp_path: Path) -> None:
    source = "synthetic://road?seed=3&fps=100"
    done = demo(tmp_path, "--frames", "5", "--json", "--source", source)
    assert "no MQTT broker" in done.stderr
    assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == [0, 1, 2, 3, 4]


def test_a_port_that_is_taken_is_named_with_the_flag_of_the_demo(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = demo(tmp_path, "--serve", port)
    assert done.returncode == 69
    assert f"127.0.0.1:{port}: Address already in use; choose another port" in done.stderr
    assert "--serve PORT" in done.stderr
