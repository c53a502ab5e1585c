"""SIGHUP changes the cameras of a running daemon, and those that stay notice nothing."""

from __future__ import annotations

import shutil
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from integration.test_metrics import scrape
from support.polling_server import POLL
from support.settings_drive import MODELS, TOPIC, camera

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.daemon_process import Process
    from support.settings_drive import Drive

PATIENCE_S = 30.0


def cameras_in_metrics(daemon: Drive) -> set[str]:
    return {label for name, label in scrape(daemon.process) if name == "edge_frames_total"}


def test_cameras_come_and_go_and_the_others_notice_nothing(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"), camera("rear", 2))
    daemon.wait_for_lanes("front")
    daemon.wait_for_lanes("rear")

    said = daemon.reload(camera("front"), camera("left", 3))
    assert "settings: reloaded; cameras: added left; removed rear" in said
    daemon.wait_for_lanes("left")
    daemon.wait_for_lanes("front")
    assert cameras_in_metrics(daemon) == {"front", "left"}
    daemon.subscriber.wait(f"{TOPIC}/rear/status", lambda m: not m)

    assert "changed left" in daemon.reload(camera("front"), camera("left", 4))
    daemon.wait_for_lanes("left")
    daemon.wait_for_lanes("front")
    front = daemon.subscriber.messages[f"{TOPIC}/front/lanes"]
    ids = [message["frame_id"] for message in front]
    # One run of frames from the start on: each arrived here, or was replaced by a newer one.
    assert ids == sorted(set(ids))
    assert ids[-1] - ids[0] + 1 - len(ids) <= front[-1]["dropped"]
    assert daemon.process.terminate() == 0


def test_a_bad_file_changes_nothing_and_the_log_says_why(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"))
    for bad, why in (
        ("[cameras.front]\nurl = 'x'\n", 'cameras.front.url: unknown key; did you mean "uri"?'),
        ("[cameras.front", "config.toml: not TOML"),
        (camera("rear", 2, 'model = "other"\n'), "cameras.rear.model: 'other' gives no lanes"),
        ("[cameras.rear]\nuri = '/no/such/clip.mp4'\n", "camera rear: /no/such/clip.mp4: no such"),
    ):
        said = daemon.reload(bad)
        assert "settings: not reloaded, everything stays as it is: " in said
        assert why in said
        daemon.wait_for_lanes("front")
    daemon.config.write_text("")
    assert "config.toml: is empty, as a file that was cut short is" in daemon.reload_file()
    daemon.wait_for_lanes("front")
    assert cameras_in_metrics(daemon) == {"front"}


def test_what_needs_a_restart_is_named_and_the_cameras_change(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"))
    daemon.reload(camera("rear"), more='[python]\nsandbox = "off"\n[serving]\nname = "x"\n')
    daemon.wait_for_log('settings: serving.name: "triton" -> "x": restart needed, "triton" stays')
    daemon.wait_for_log('settings: python.sandbox: "auto" -> "off": restart needed, "auto" stays')
    daemon.wait_for_lanes("rear")


def test_reloads_in_quick_succession_end_with_the_last_file(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"))
    for n in range(2, 7):
        daemon.write(camera("front"), camera(f"rear{n}", n))
        daemon.hang_up()
    daemon.wait_for_lanes("rear6")
    daemon.wait_for_lanes("front")
    assert cameras_in_metrics(daemon) == {"front", "rear6"}
    assert "removed front" not in daemon.log


def test_a_reload_while_a_model_is_replaced_keeps_the_lanes_of_all(
    drive: Callable[..., Drive], tmp_path: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(MODELS, models)
    flags = (*POLL, f"--model-repository={models}", f"--repository-copies={tmp_path / 'store'}")
    daemon = drive(camera("front"), flags=flags)
    daemon.wait_for_lanes("front")
    decode = models / "lane_decode" / "config.pbtxt"
    for n in range(3):
        decode.write_text(decode.read_text().replace('"45"', '"46"') + f"# {n}\n")
        daemon.reload(camera("front"), camera(f"rear{n}", n))
        daemon.wait_for_lanes(f"rear{n}")
        daemon.wait_for_lanes("front")
    # Late ones there may be, on a machine that also loads models.
    front = daemon.subscriber.messages[f"{TOPIC}/front/lanes"]
    assert "FRAME_STATUS_INVALID" not in {message["status"] for message in front}


@pytest.mark.parametrize("accepts", [True, False], ids=["stuck", "lost"])
def test_a_camera_that_hangs_or_is_lost_is_replaced_while_the_others_go_on(
    drive: Callable[..., Drive], accepts: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not accepts:
            silent.close()
        away = f'[cameras.rear]\nuri = "rtsp://127.0.0.1:{port}/road"\n'
        daemon = drive(camera("front"), away)
        daemon.wait_for_lanes("front")
        said = daemon.reload(camera("front"), camera("rear", 2), camera("left", 3))
        assert "settings: reloaded; cameras: added left; changed rear" in said
        for name in ("front", "rear", "left"):
            daemon.wait_for_lanes(name)
        assert "removed left" in daemon.reload(camera("front"), away)
        daemon.wait_for_lanes("front")
        assert daemon.process.terminate() == 0


def test_without_a_file_a_hang_up_ends_the_daemon_as_it_always_did(
    start: Callable[..., Process],
) -> None:
    process = start(f"--model-repository={MODELS}")
    process.popen.send_signal(signal.SIGHUP)
    assert process.popen.wait(PATIENCE_S) == -signal.SIGHUP
