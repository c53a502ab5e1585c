"""The shipped unit, as it is, under a real systemd in a container."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from onnx import TensorProto, helper
from systemd_machine import (
    CONFIG,
    Container,
    Unit,
    skip_where_no_container_can_be_made,
    wait_for,
)

from edge_server.daemon.daemon import Daemon
from edge_server.errors import StageStuck
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).parent / "edge-server"
SHIPPED_CONFIG = CHECKOUT / "systemd/edge-server.toml"
SHIPPED_MODELS = "/usr/share/edge_server/models"

ROAD = f"""
[repository]
paths = ["{SHIPPED_MODELS}"]
[cameras.road]
uri = "synthetic://road?seed=7&fps=10"
"""

REPOSITORY = "/srv/models"
POLL = f"""
[repository]
paths = ["{REPOSITORY}"]
mode = "poll"
poll_s = 0.2
settle_s = 0.2
probation_requests = 0
"""

# What `m` answers to 0.
ASK = """
import numpy, tritonclient.grpc as triton
x = triton.InferInput("x", [1], "FP32")
x.set_data_from_numpy(numpy.zeros(1, numpy.float32))
with triton.InferenceServerClient("127.0.0.1:8001") as client:
    print(client.infer("m", [x]).as_numpy("y")[0])
"""

# The unit is run as shipped but for this. A shorter watchdog saves 8 s. The checkout and its Python
# may lie in a home, which ProtectHome=yes hides; an installed package lies in /usr.
DROP_IN = """
[Service]
WatchdogSec=2
ProtectHome=tmpfs
BindReadOnlyPaths={seen}
"""


pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    skip_where_no_container_can_be_made()
    booted = Container(
        tmp_path_factory.mktemp("systemd"),
        *(f"--bind-ro={path}" for path in _seen_paths()),
        f"--bind-ro={CHECKOUT / 'models'}:{SHIPPED_MODELS}",
    )
    try:
        booted.wait_until_up()
        yield booted
    finally:
        booted.close()


@pytest.fixture(scope="module")
def installed(container: Container) -> Unit:
    """The unit, its user and its command, where a package puts them."""
    shipped = CHECKOUT / "systemd"
    container.write(
        "/usr/lib/systemd/system/edge-server.service", (shipped / "edge-server.service").read_text()
    )
    container.write(
        "/etc/systemd/system/edge-server.service.d/test.conf",
        DROP_IN.format(seen=" ".join(_seen_paths())),
    )
    container.write(
        "/usr/lib/sysusers.d/edge-server.conf", (shipped / "edge-server.sysusers").read_text()
    )
    container.do("systemd-sysusers", "edge-server.conf")
    container.do("ln", "-sf", str(COMMAND), "/usr/bin/edge-server")
    container.do("systemctl", "daemon-reload")
    return Unit(container)


@pytest.fixture
def unit(installed: Unit) -> Iterator[Unit]:
    """The unit; where a test fails, its journal is shown."""
    yield installed
    print(*(f"{us / 1e6:10.3f} {text}" for us, text in installed.journal()), sep="\n")


@pytest.fixture
def active(unit: Unit) -> Unit:
    """The unit, active, with a camera that sees a road."""
    if unit["ActiveState"] != "active":
        assert unit.start_with(ROAD) == 0
    return unit


def test_the_examples_in_the_shipped_configuration_are_valid(tmp_path: Path) -> None:
    example = re.compile(r"^# (?=\[|[a-z_]+ = )", re.MULTILINE)
    everything = tmp_path / "everything.toml"
    everything.write_text(example.sub("", SHIPPED_CONFIG.read_text()))
    settings = read_settings(everything, {})
    assert settings.mqtt is not None
    assert settings.cameras


def test_the_shipped_configuration_starts(unit: Unit) -> None:
    assert unit.start_with(SHIPPED_CONFIG.read_text()) == 0
    assert "no camera" in unit["StatusText"]


def test_it_is_active_only_when_it_is_ready(unit: Unit) -> None:
    unit.start_with(ROAD)
    assert unit["ActiveState"] == "active"
    wait_for(lambda: "serving 4 models, 1 camera, broker off, " in unit["StatusText"])
    assert unit["StatusText"].endswith(" lanes/s")
    started_us = int(unit["ExecMainStartTimestampMonotonic"])
    active_us = int(unit["ActiveEnterTimestampMonotonic"])
    (loaded_us,) = (
        us
        for us, text in unit.journal()
        if us > started_us and "model lane_detection: READY" in text
    )
    assert started_us < loaded_us < active_us


def test_it_runs_as_its_own_user_without_privileges(active: Unit) -> None:
    status = active.container.do("cat", f"/proc/{active['MainPID']}/status")
    numbers = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user = active.container.do("id", "-u", "edge-server")
    groups = active.container.do("id", "-G", "edge-server").split()
    assert set(numbers["Uid"].split()) == {user}
    assert set(numbers["Groups"].split()) == set(groups)
    assert {"video", "render"} < set(active.container.do("id", "-nG", "edge-server").split())
    assert numbers["NoNewPrivs"] == "1"
    assert int(numbers["CapBnd"], 16) == 0


@pytest.mark.parametrize("how", ["SEGV", "KILL"])
def test_a_crash_is_restarted(active: Unit, how: str) -> None:
    before = active["MainPID"]
    active.kill(how)
    wait_for(lambda: active.restarted(before))


def test_a_hang_is_ended_by_the_watchdog_and_restarted(active: Unit) -> None:
    before = active["MainPID"]
    active.kill("STOP")
    wait_for(lambda: active.restarted(before))
    said = [text for _, text in active.journal()]
    assert any("Watchdog timeout" in text for text in said)
    # Where it hung: PYTHONFAULTHANDLER.
    assert "Fatal Python error: Aborted" in said


def test_a_repository_that_is_mounted_later_is_waited_for(unit: Unit) -> None:
    late = "/srv/late"
    assert unit.start_with(f'[repository]\npaths = ["{late}"]\n') != 0
    # More tries than systemd's own limit of 5 in 10 s allows.
    wait_for(lambda: int(unit["NRestarts"]) >= 7, timeout_s=90)
    said = str(unit.journal())
    assert f"{late}: the model repository cannot be read" in said
    assert "status=69" in said
    unit.container.write(f"{late}.new/m/config.pbtxt", 'backend: "onnxruntime"')
    unit.container.do("mkdir", f"{late}.new/m/1")
    unit.container.write_bytes(f"{late}.new/m/1/model.onnx", _network(1))
    unit.container.do("mv", f"{late}.new", late)
    wait_for(lambda: unit["ActiveState"] == "active")
    assert unit["StatusText"].startswith("serving 1 model,")


def test_the_service_outlives_a_child_that_the_kernel_kills_for_memory(active: Unit) -> None:
    # That kill itself needs control groups of version 2, which not every machine has.
    assert active["OOMPolicy"] == "continue"


def test_stop_is_clean_and_quick(active: Unit) -> None:
    begun = time.monotonic()
    active.container.do("systemctl", "stop", "edge-server")
    assert time.monotonic() - begun < 5
    assert active["ActiveState"] == "inactive"
    assert active["Result"] == "success"
    assert active["ExecMainStatus"] == "0"
    assert "edge-server: stopped" in [text for _, text in active.journal()]


def test_models_that_are_pushed_serve_and_serve_again_after_a_crash_without_their_repository(
    unit: Unit,
) -> None:
    container = unit.container

    def push(number: float) -> None:
        container.write("/root/m/config.pbtxt", 'backend: "onnxruntime"')
        container.do("mkdir", "-p", "/root/m/1")
        container.write_bytes("/root/m/1/model.onnx", _network(number))
        container.do("edge-server", "models", "push", "/root/m", "--to", REPOSITORY)

    def answer() -> float:
        return float(container.do(sys.executable, "-c", ASK))

    def kept() -> int:
        return sum("model m: last known good is now" in text for _, text in unit.journal())

    container.do("mkdir", REPOSITORY)
    push(1)
    assert unit.start_with(POLL) == 0
    try:
        assert answer() == 1
        push(2)
        wait_for(lambda: kept() == 2)
        assert answer() == 2
        state = "/var/lib/edge_server"
        assert container.do("stat", "-c", "%U %a", state) == "edge-server 700"
        assert len(container.do("ls", f"{state}/store/copies").split()) == 2
        container.do("mv", REPOSITORY, "/srv/away")
        before = unit["MainPID"]
        unit.kill("KILL")
        wait_for(lambda: unit.restarted(before))
        assert answer() == 2
        container.do("mv", "/srv/away", REPOSITORY)
        push(3)
        wait_for(lambda: kept() == 3)
        assert answer() == 3
    finally:
        container.do("systemctl", "stop", "edge-server")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(ROAD + "colour = 1\n", id="unknown-key"),
        # Nothing but an inference shows this one; so being active says that one went well.
        pytest.param(ROAD + 'model = "lane_decode"\n', id="camera-model-gives-no-lanes"),
    ],
)
def test_a_wrong_configuration_is_no_reason_to_try_again(unit: Unit, wrong: str) -> None:
    was_active_us = unit["ActiveEnterTimestampMonotonic"]
    assert unit.start_with(wrong) != 0
    # One that is to be restarted would be `activating` by now.
    assert unit["ActiveState"] == "failed"
    assert unit["ExecMainStatus"] == "78"
    assert unit["NRestarts"] == "0"
    assert unit["ActiveEnterTimestampMonotonic"] == was_active_us


def test_a_reload_changes_the_cameras_of_the_same_process(active: Unit) -> None:
    pid = active["MainPID"]
    rear = '[cameras.rear]\nuri = "synthetic://road?seed=3&fps=5"\n'
    try:
        for config, seen in (
            (ROAD + rear, lambda status: ", 2 cameras, " in status),
            (
                "[cameras",
                lambda status: (
                    ", 2 cameras, " in status
                    and f"; settings not reloaded: {CONFIG}: not TOML: " in status
                ),
            ),
            (
                ROAD + "[metrics]\nport = 8003\n",
                lambda status: (
                    ", 1 camera, " in status
                    and status.endswith("; restart needed for metrics.port")
                ),
            ),
            (ROAD, lambda status: ", 1 camera, " in status and ";" not in status),
        ):
            active.container.write(CONFIG, config)
            active.container.do("systemctl", "reload", "edge-server")
            wait_for(lambda: active["ActiveState"] == "active")  # not `reloading` any more
            wait_for(lambda seen=seen: seen(active["StatusText"]))
        assert active["MainPID"] == pid
        texts = [text for _, text in active.journal()]
        assert any(f"not reloaded, everything stays as it is: {CONFIG}" in text for text in texts)
    finally:
        active.container.write(CONFIG, ROAD)


def test_doctor_tells_how_the_unit_is(active: Unit) -> None:
    _, findings = _doctor(active.container)
    assert findings["unit"] == ["warning", "sudo systemctl enable edge-server"]

    active.container.do("systemctl", "enable", "edge-server")
    told, findings = _doctor(active.container)
    assert findings["unit"] == ["ok", ""]
    assert findings["grpc_port"] == ["ok", ""]
    assert told["board"]["account"]["name"] == "edge-server"

    active.start_with("[mqtt]\nhsot = 1\n")
    told, findings = _doctor(active.container)
    assert findings["unit"] == ["fault", f"edge-server check --config {CONFIG}"]
    assert not told["ok"]


def test_a_pipeline_that_hangs_ends_the_daemon_instead_of_feeding_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, stop = threading.Event(), threading.Event()
    give_up = threading.Timer(30, stop.set)
    config = tmp_path / "config.toml"
    config.write_text(
        ROAD.replace(SHIPPED_MODELS, str(CHECKOUT / "models"))
        + "[grpc]\nport = 0\n[metrics]\nport = 0\n"
    )
    daemon = Daemon(read_settings(config, {}), [lambda *_: let_go.wait(60)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        give_up.start()
        daemon.start(stop)
        try:
            daemon.pipelines[0].worker.deadline_s = 1
            with pytest.raises(StageStuck, match="lanes-road"):
                daemon.run(stop)
        finally:
            begun = time.monotonic()
            daemon.stop()
            took_s = time.monotonic() - begun
            let_go.set()
            give_up.cancel()
        systemd.setblocking(False)
        told = [message.partition("\n")[0] for message in iter(lambda: _received(systemd), "")]
    # The restart is systemd's; here nobody waits for what hangs.
    assert took_s < 2
    assert told[0] == "READY=1"
    assert told[-1] == "STOPPING=1"
    assert set(told[1:-1]) == {"WATCHDOG=1"}


def _network(number: float) -> bytes:
    """y = x + number."""
    tensor = helper.make_tensor("k", TensorProto.FLOAT, [1], [number])
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    node = helper.make_node("Add", ["x", "k"], ["y"])
    graph = helper.make_graph([node], "g", io[:1], io[1:], [tensor])
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def _received(systemd: socket.socket) -> str:
    """One message, or nothing where none is left."""
    with contextlib.suppress(BlockingIOError):
        return systemd.recv(4096).decode()
    return ""


def _doctor(container: Container) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """All that it tells, and level and remedy of each check."""
    told = json.loads(container.run("edge-server", "doctor", "--json").stdout)
    return told, {each["name"]: [each["level"], each["remedy"]] for each in told["checks"]}


def _seen_paths() -> list[str]:
    """What the daemon is made of here; outside /usr, which it always sees."""
    paths = {str(CHECKOUT), sys.prefix, sys.base_prefix}
    outside = {path for path in paths if not path.startswith("/usr")}
    inside = {path for path in outside for other in outside if path.startswith(f"{other}/")}
    return sorted(outside - inside)
