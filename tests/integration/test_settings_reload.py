"""SIGHUP changes the cameras of a running daemon, and nothing else."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import POLL
from tests.integration.test_metrics import scrape
from tests.mosquitto import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.conftest import Process
    from tests.mosquitto import Mosquitto

MODELS = Path(__file__).parents[2] / "models"
PATIENCE_S = 30.0
CAMERA = '[cameras.{name}]\nuri = "synthetic://road?seed={seed}&fps=5&width=320&height=180"\n'
TOPIC = "edge/v1/tested/cameras"


def camera(name: str, seed: int = 1, more: str = "") -> str:
    return CAMERA.format(name=name, seed=seed) + more


class Drive:
    """A daemon with a broker, whose settings the test rewrites."""

    def __init__(
        self,
        folder: Path,
        start: Callable[..., Process],
        broker: Mosquitto,
        *cameras: str,
        flags: tuple[str, ...] = (),
    ) -> None:
        self._config = folder / "config.toml"
        self.base = (
            f'[device]\nid = "tested"\n[repository]\npaths = ["{MODELS}"]\n'
            f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n'
        )
        self.subscriber = Subscriber(broker.port, "edge/v1/tested/#")
        self.write(*cameras)
        self.process = start("--config", str(self._config), *flags)

    def write(self, *cameras: str, more: str = "") -> None:
        self._config.write_text("".join((self.base, *cameras, more)))

    def hang_up(self) -> None:
        self.process.popen.send_signal(signal.SIGHUP)

    def reload(self, *cameras: str, more: str = "") -> str:
        """Rewrite the cameras and reload; what the log says of it."""
        self.write(*cameras, more=more)
        before = len(self.log)
        self.hang_up()
        self.process.wait_for("RELOADING=1\nMONOTONIC_USEC=")
        self.process.wait_for("READY=1")
        return self.log[before:]

    @property
    def log(self) -> str:
        return self.process.log.read_text()

    def wait_for_lanes(self, name: str) -> dict:
        """New ones, of which the first may be of before."""
        heard = self.subscriber.messages.get(f"{TOPIC}/{name}/lanes", [])
        after = heard[-1]["seq"] + 1 if heard else -1
        return self.subscriber.wait(f"{TOPIC}/{name}/lanes", lambda m: m["seq"] > after)

    def cameras_in_metrics(self) -> set[str]:
        return {label for name, label in scrape(self.process) if name == "edge_frames_total"}


@pytest.fixture
def drive(
    tmp_path: Path, start: Callable[..., Process], mosquitto: Mosquitto
) -> Iterator[Callable[..., Drive]]:
    made: list[Drive] = []

    def make(*cameras: str, flags: tuple[str, ...] = ()) -> Drive:
        made.append(Drive(tmp_path, start, mosquitto, *cameras, flags=flags))
        return made[-1]

    yield make
    for each in made:
        each.subscriber.close()


def test_cameras_come_and_go_and_the_others_notice_nothing(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"), camera("rear", 2))
    daemon.wait_for_lanes("front")
    daemon.wait_for_lanes("rear")

    said = daemon.reload(camera("front"), camera("left", 3))
    assert "settings: reloaded; cameras: added left; removed rear" in said
    daemon.wait_for_lanes("left")
    daemon.wait_for_lanes("front")
    assert daemon.cameras_in_metrics() == {"front", "left"}
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
    assert daemon.cameras_in_metrics() == {"front"}


def test_what_needs_a_restart_is_named_and_the_cameras_change(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"))
    said = daemon.reload(camera("rear"), more='[python]\nsandbox = "off"\n[serving]\nname = "x"\n')
    assert 'settings: serving.name: "triton" -> "x": restart needed, "triton" stays' in said
    assert 'settings: python.sandbox: "auto" -> "off": restart needed, "auto" stays' in said
    daemon.wait_for_lanes("rear")


def test_reloads_in_quick_succession_end_with_the_last_file(drive: Callable[..., Drive]) -> None:
    daemon = drive(camera("front"))
    for n in range(2, 7):
        daemon.write(camera("front"), camera(f"rear{n}", n))
        daemon.hang_up()
    daemon.wait_for_lanes("rear6")
    daemon.wait_for_lanes("front")
    assert daemon.cameras_in_metrics() == {"front", "rear6"}
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
