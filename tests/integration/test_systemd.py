"""The shipped unit, as it is, under a real systemd in a container."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from support.adding_models import network
from support.notify_socket import NotifySocket
from support.systemd_machine import (
    CHECKOUT,
    CONFIG,
    SHIPPED_MODELS,
    Container,
    Unit,
    checkout_binds,
    install_units,
    skip_where_no_container_can_be_made,
)
from support.waiting import wait_until

from edge_server.daemon.daemon import Daemon
from edge_server.errors import StageStuck
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.certificates import Authority

SHIPPED_CONFIG = CHECKOUT / "systemd/edge-server.toml"

ROAD = f"""
[repository]
paths = ["{SHIPPED_MODELS}"]
[cameras.road]
uri = "synthetic://road?seed=7&fps=2"
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

# Stand-ins for NVIDIA's programs, which only a Jetson has; what they print is as published. The
# mode 3 needs a reboot, and without a yes nothing happens.
NVPMODEL_CONF = """\
< POWER_MODEL ID=0 NAME=MAXN >
< POWER_MODEL ID=1 NAME=10W >
< POWER_MODEL ID=3 NAME=25W >
< PM_CONFIG DEFAULT=1 >
"""
STAND_INS = {
    "/usr/sbin/nvpmodel": """\
#!/bin/sh
status=/var/lib/nvpmodel/status
case "$1" in
-q) echo "NV Power Mode: SOME"; sed -n 's/pmode:0*\\([0-9]\\)$/\\1/p' $status 2>/dev/null || true
    [ -e $status ] || echo 1 ;;
-m) if [ "$2" = 3 ]; then
        echo "NVPM WARN: Reboot required for changing to this power mode: 3"
        read -r answer && [ "$answer" = YES ] && touch /rebooted
        exit 1
    fi
    printf 'pmode:%04d\\n' "$2" >$status ;;
esac
""",
    "/usr/bin/jetson_clocks": """\
#!/bin/sh
case "$1" in
--store) echo stored >"$2" ;;
esac
""",
}

NVARGUS = """\
[Service]
ExecStart=/bin/sleep infinity
"""
UDEVADM = """\
#!/bin/sh
echo "stand-in: $*"
"""

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    skip_where_no_container_can_be_made()
    booted = Container(
        tmp_path_factory.mktemp("systemd"),
        *checkout_binds(),
    )
    try:
        booted.wait_until_up()
        yield booted
    finally:
        booted.close()


@pytest.fixture(scope="module")
def installed(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Unit:
    """All files of systemd/, the user and the command, where the package puts them."""
    install_units(container, tmp_path_factory.mktemp("root"))
    return Unit(container)


@pytest.fixture
def unit(installed: Unit) -> Iterator[Unit]:
    """The unit; where a test fails, its journal is shown."""
    yield installed
    print(*(f"{us / 1e6:10.3f} {text}" for us, text in installed.journal()), sep="\n")


@pytest.fixture
def active(unit: Unit) -> Unit:
    """The unit, active, with a camera that sees a road, whatever a test before it wrote."""
    if unit["ActiveState"] != "active" or unit.container.do("cat", CONFIG) != ROAD.strip():
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
    wait_until(lambda: "serving 4 models, 1 camera, broker off, " in unit["StatusText"])
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
    # Filtered system calls.
    assert numbers["Seccomp"] == "2"


def test_it_sees_a_system_that_it_cannot_write_and_no_home(active: Unit) -> None:
    container, pid = active.container, active["MainPID"]

    def inside(*command: str) -> int:
        return container.run("nsenter", "-t", pid, "-m", *command).returncode

    # Root itself cannot, in that mount namespace; outside it can.
    for path in ("/etc/x", "/usr/x", "/tmp/x", "/proc/sys/kernel/x", "/sys/fs/cgroup/x"):  # noqa: S108
        assert inside("touch", path) != 0, path
    assert inside("touch", "/var/lib/edge_server/x") == 0
    assert inside("rm", "/var/lib/edge_server/x") == 0
    mounts = container.do("cat", f"/proc/{pid}/mountinfo").splitlines()
    (root,) = (line.split()[5] for line in mounts if line.split()[4] == "/")
    assert "ro" in root.split(",")
    assert container.do("stat", "-c", "%a", f"/proc/{pid}/root/var/lib/edge_server") == "700"
    # The kernel's side of the list of devices needs its controller in the container.
    assert active["DevicePolicy"] == "closed"
    assert "char-video4linux rw" in active["DeviceAllow"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("SEGV", marks=pytest.mark.long),
        pytest.param("ABRT", marks=pytest.mark.long),
        "KILL",
    ],
)
def test_a_crash_is_restarted(active: Unit, how: str) -> None:
    before = active["MainPID"]
    active.kill(how)
    wait_until(lambda: active.restarted(before))


def test_a_hang_is_ended_by_the_watchdog_and_restarted(active: Unit) -> None:
    before = active["MainPID"]
    active.kill("STOP")
    wait_until(lambda: active.restarted(before), timeout_s=90)
    said = [text for _, text in active.journal()]
    assert any("Watchdog timeout" in text for text in said)
    # Where it hung: PYTHONFAULTHANDLER.
    assert "Fatal Python error: Aborted" in said


def test_a_repository_that_is_mounted_later_is_waited_for(unit: Unit) -> None:
    late = "/srv/late"
    assert unit.start_with(f'[repository]\npaths = ["{late}"]\n') != 0
    # More tries than systemd's own limit of 5 in 10 s allows.
    wait_until(lambda: int(unit["NRestarts"]) >= 6, timeout_s=90)
    said = str(unit.journal())
    assert f"{late}: the model repository cannot be read" in said
    assert "status=69" in said
    unit.container.write(f"{late}.new/m/config.pbtxt", 'backend: "onnxruntime"')
    unit.container.do("mkdir", f"{late}.new/m/1")
    unit.container.write_bytes(f"{late}.new/m/1/model.onnx", network(1))
    unit.container.do("mv", f"{late}.new", late)
    wait_until(lambda: unit["ActiveState"] == "active")
    assert unit["StatusText"].startswith("serving 1 model,")


def test_systemd_keeps_the_service_where_a_child_is_killed_for_memory(active: Unit) -> None:
    # The unit's policy alone: the kill needs control groups of version 2, which not all have.
    assert active["OOMPolicy"] == "continue"


def test_stop_is_clean_and_within_the_units_time(active: Unit) -> None:
    active.container.do("systemctl", "stop", "edge-server")
    # Past TimeoutStopSec= the result is "timeout".
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
        container.write_bytes("/root/m/1/model.onnx", network(number))
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
        wait_until(lambda: kept() == 2)
        assert answer() == 2
        state = "/var/lib/edge_server"
        assert container.do("stat", "-c", "%U %a", state) == "edge-server 700"
        assert len(container.do("ls", f"{state}/store/copies").split()) == 2
        container.do("mv", REPOSITORY, "/srv/away")
        before = unit["MainPID"]
        unit.kill("KILL")
        wait_until(lambda: unit.restarted(before))
        assert answer() == 2
        container.do("mv", "/srv/away", REPOSITORY)
        push(3)
        wait_until(lambda: kept() == 3)
        assert answer() == 3
    finally:
        container.do("systemctl", "stop", "edge-server")


def test_a_wrong_configuration_is_no_reason_to_try_again(unit: Unit) -> None:
    was_active_us = unit["ActiveEnterTimestampMonotonic"]
    # Nothing but an inference shows this one; so being active says that one went well.
    assert unit.start_with(ROAD + 'model = "lane_decode"\n') != 0
    # One that is to be restarted would be `activating` by now.
    assert unit["ActiveState"] == "failed"
    assert unit["ExecMainStatus"] == "78"
    assert unit["NRestarts"] == "0"
    # 0 where systemd has forgotten the unit in between.
    assert unit["ActiveEnterTimestampMonotonic"] in (was_active_us, "0")


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
            wait_until(lambda: active["ActiveState"] == "active")  # not `reloading` any more
            wait_until(lambda seen=seen: seen(active["StatusText"]))
        assert active["MainPID"] == pid
        texts = [text for _, text in active.journal()]
        assert any(f"not reloaded, everything stays as it is: {CONFIG}" in text for text in texts)
    finally:
        active.container.write(CONFIG, ROAD)


def test_secrets_come_as_credentials_that_only_the_daemon_reads(
    unit: Unit, authority: Authority
) -> None:
    container = unit.container
    certificate, key = authority.issue("grpc")
    container.write("/etc/edge_server/grpc.crt", certificate.read_text())
    container.write("/root/grpc_key", key.read_text())
    container.do("chmod", "600", "/root/grpc_key")
    container.write("/root/mqtt_password", "sesame")
    container.do("chmod", "600", "/root/mqtt_password")
    drop_in = "/etc/systemd/system/edge-server.service.d/secrets.conf"
    container.write(
        drop_in,
        "[Service]\nLoadCredential=mqtt_password:/root/mqtt_password\n"
        "LoadCredential=grpc_key:/root/grpc_key\n",
    )
    container.do("systemctl", "daemon-reload")
    credential = "/run/credentials/edge-server.service/mqtt_password"
    mqtt = f'[mqtt]\nhost = "127.0.0.1"\nusername = "truck"\npassword_file = "{credential}"\n'
    grpc_key = credential.replace("mqtt_password", "grpc_key")
    tls = (
        '[grpc.tls]\nenabled = true\ncertificate = "/etc/edge_server/grpc.crt"\n'
        f'key = "{grpc_key}"\n'
    )
    try:
        # A password or a key that cannot be read ends the daemon.
        assert unit.start_with(ROAD + mqtt + tls) == 0
        seen = f"/proc/{unit['MainPID']}/root{credential}"
        assert container.do("stat", "-c", "%a", seen) in {"400", "440"}
        reader = ("setpriv", "--reuid=nobody", "--clear-groups", "cat", seen)
        assert container.run(*reader).returncode != 0
        assert "sesame" not in str(unit.journal())
        # A secret that is missing is systemd's to name: no daemon starts without it.
        container.do("rm", "/root/mqtt_password")
        container.run("systemctl", "restart", "--no-block", "edge-server")
        # Not Result, nor ExecMainStatus: the next try may have begun.
        wait_until(lambda: any("status=243" in text for _, text in unit.journal()), every_s=0.2)
    finally:
        container.do("rm", drop_in)
        container.do("systemctl", "daemon-reload")
        container.do("systemctl", "stop", "edge-server")


def test_a_second_instance_serves_beside_the_first_with_ports_of_its_own(active: Unit) -> None:
    container = active.container
    rear = Unit(container, "edge-server@rear")
    ports = "[grpc]\nport = 8011\n[metrics]\nport = 8012\n[http]\nport = 8010\n"
    container.write("/etc/edge_server/rear.toml", ROAD + ports)
    container.do("systemctl", "start", "edge-server@rear")
    try:
        assert rear["ActiveState"] == active["ActiveState"] == "active"
        for state in ("/var/lib/edge_server-rear", "/run/edge_server-rear"):
            assert container.do("stat", "-c", "%U", state) == "edge-server"
        before = active["MainPID"]
        # The same ports as the first: its end, with their name, and no harm to the first.
        container.write("/etc/edge_server/rear.toml", ROAD)
        assert container.run("systemctl", "restart", "edge-server@rear").returncode != 0
        assert any("127.0.0.1:8001" in text for _, text in rear.journal())
        # Not ExecMainStatus: the next try may have begun.
        assert any("status=69" in text for _, text in rear.journal())
        assert (active["MainPID"], active["ActiveState"]) == (before, "active")
    finally:
        container.do("systemctl", "stop", "edge-server@rear")


def test_plans_are_looked_for_at_boot_and_a_machine_without_any_is_well(unit: Unit) -> None:
    container, plans = unit.container, Unit(unit.container, "edge-server-plans")
    container.write(CONFIG, ROAD)
    container.do("systemctl", "restart", "edge-server-plans")
    wait_until(lambda: plans["SubState"] == "exited")
    assert (plans["ActiveState"], plans["Result"]) == ("active", "success")
    assert any("none is needed: no CUDA driver" in text for _, text in plans.journal())
    assert "edge-server.service" in plans["Before"]
    # One that needs a GPU, which this machine has not: said, and no unit in red.
    needs_a_gpu = 'platform: "tensorrt_plan"\ninstance_group [ { kind: KIND_GPU } ]\n'
    container.write("/srv/plans/m/config.pbtxt", needs_a_gpu)
    container.write_bytes("/srv/plans/m/1/model.onnx", network(1))
    container.write(CONFIG, '[repository]\npaths = ["/srv/plans"]\n')
    container.do("systemctl", "restart", "edge-server-plans")
    wait_until(lambda: plans["ExecMainStatus"] == "69", otherwise=plans.journal)
    assert (plans["ActiveState"], plans["Result"]) == ("active", "success")
    assert any("no plan can be built here" in text for _, text in plans.journal())


def test_the_power_mode_of_the_settings_is_set_by_a_stand_in_for_nvpmodel(unit: Unit) -> None:
    container, power = unit.container, Unit(unit.container, "edge-server-power")
    container.write(CONFIG, ROAD + '[power]\nmode = "MAXN"\nclocks = "max"\n')
    container.do("systemctl", "start", "edge-server-power")
    assert (power["ActiveState"], power["ConditionResult"]) == ("inactive", "no")
    container.write("/etc/nvpmodel.conf", NVPMODEL_CONF)
    for path, text in STAND_INS.items():
        container.write(path, text)
        container.do("chmod", "755", path)
    container.do("mkdir", "-p", "/var/lib/nvpmodel")
    container.do("systemctl", "restart", "edge-server-power")
    said = [text for _, text in power.journal()]
    assert (power["ActiveState"], power["SubState"]) == ("active", "exited")
    assert "power: power mode MAXN (0) set" in said
    assert "power: clocks at their highest" in said
    assert container.do("cat", "/var/lib/nvpmodel/status") == "pmode:0000"
    # It asks for a reboot: said, the unit fails, the board stays up and lanes start all the same.
    container.write(CONFIG, ROAD + '[power]\nmode = "25W"\n')
    assert container.run("systemctl", "restart", "edge-server-power").returncode != 0
    assert power["ExecMainStatus"] == "69"
    assert any("25W needs a reboot" in text for _, text in power.journal())
    assert unit.start_with(ROAD + '[power]\nmode = "25W"\n') == 0


@pytest.mark.parametrize(
    ("release", "allowed"),
    [
        pytest.param("# R36 (release), REVISION: 4.3, GCID: 1", "/dev/nvmap rw", id="JetPack-6"),
        pytest.param("# R39 (release), REVISION: 2.0, GCID: 1", "/dev/nvmap rw", id="JetPack-7"),
        pytest.param("# R52 (release), REVISION: 0.0, GCID: 1", "", id="unknown"),
        pytest.param("", "char-nvidia* rw", id="PC"),
    ],
)
def test_the_linux_of_a_jetson_chooses_what_devices_are_allowed(
    unit: Unit, release: str, allowed: str
) -> None:
    container = unit.container
    if release:
        container.write("/etc/nv_tegra_release", f"{release}\n")
    try:
        container.do("systemctl", "daemon-reload")
        for name in ("edge-server", "edge-server@rear", "edge-server-plans"):
            one = Unit(container, name)
            assert one["DevicePolicy"] == ("closed" if allowed else "auto")
            assert allowed in one["DeviceAllow"]
            assert ("/dev/nvmap" in one["DeviceAllow"]) == ("nvmap" in allowed)
    finally:
        container.run("rm", "-f", "/etc/nv_tegra_release")
        container.do("systemctl", "daemon-reload")


def test_a_jetson_whose_driver_comes_late_says_so_and_starts_anew_when_it_is_there(
    unit: Unit,
) -> None:
    """No board: a release file makes this machine a Jetson, a plain file its driver; `udevadm` is a
    stand-in."""
    container = unit.container
    container.write("/etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1\n")
    container.write("/usr/bin/udevadm", UDEVADM)
    container.do("chmod", "755", "/usr/bin/udevadm")
    try:
        container.do("systemctl", "daemon-reload")
        container.do("systemctl", "start", "edge-server-drivers")
        drivers = Unit(container, "edge-server-drivers")
        assert "stand-in: settle --timeout=30" in [text for _, text in drivers.journal()]
        assert "edge-server-drivers.service" in unit["After"]
        assert "nv-load-display-modules.service" in drivers["After"]
        # Files of the list that this machine does not have are skipped.
        assert unit.start_with(ROAD) == 0
        said = " ".join(text for _, text in unit.journal())
        assert "on a Jetson KIND_AUTO is KIND_GPU" in said
        wait_until(lambda: unit["StatusText"].endswith("; no_gpu"))
        before = unit["MainPID"]
        container.do("touch", "/dev/nvmap")
        wait_until(lambda: unit.restarted(before))
        said = " ".join(text for _, text in unit.journal())
        assert "the GPU has come: /dev/nvmap came after this process" in said
    finally:
        container.run("rm", "-f", "/etc/nv_tegra_release", "/dev/nvmap", "/usr/bin/udevadm")
        container.do("systemctl", "daemon-reload")


def test_argus_is_restarted_on_request_of_the_daemon(active: Unit) -> None:
    """A stand-in for nvargus-daemon, and a release file that makes this machine a Jetson. The
    request is written as the daemon does it, see `Argus` in camera_set.py."""
    container = active.container
    container.write("/etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1\n")
    container.write("/etc/systemd/system/nvargus-daemon.service", NVARGUS)
    argus, path = Unit(container, "nvargus-daemon"), Unit(container, "edge-server-argus.path")
    request, restarted = "/run/edge_server/restart-argus", "/run/edge_server_argus/restarted"
    as_daemon = ("setpriv", "--reuid=edge-server", "--regid=edge-server", "--clear-groups")
    try:
        container.do("systemctl", "daemon-reload")
        container.do("systemctl", "start", "nvargus-daemon", "edge-server-argus.path")
        assert path["ActiveState"] == "active"
        for _ in range(2):
            before = argus["MainPID"]
            container.do(*as_daemon, "touch", request)
            wait_until(lambda before=before: argus["MainPID"] not in (before, "0"))
            wait_until(lambda: container.run("test", "-e", request).returncode != 0)
            wait_until(lambda: path["SubState"] == "waiting")
            assert float(container.do(*as_daemon, "cat", restarted).split()[0]) > 0
        assert Unit(container, "edge-server-argus")["NRestarts"] == "0"
    finally:
        container.run("systemctl", "stop", "edge-server-argus.path", "nvargus-daemon")
        container.run(
            *("rm", "-f", "/etc/nv_tegra_release", "/etc/systemd/system/nvargus-daemon.service")
        )
        container.do("systemctl", "daemon-reload")


@pytest.mark.parametrize("release", ["", "\x01 R36", "# R35 (release), x", "# R99 (release)", None])
def test_a_jetson_whose_release_nobody_knows_gets_its_devices(
    release: str | None, tmp_path: Path
) -> None:
    place = tmp_path / "etc/nv_tegra_release"
    place.parent.mkdir()
    if release is None:
        place.mkdir()
    else:
        place.write_text(release)
    environment = {"PATH": "/usr/bin:/bin", "ROOT": str(tmp_path), "LISTS": "/lists"}
    script = CHECKOUT / "systemd/edge-server-devices.generator"
    subprocess.run([script, tmp_path / "out"], env=environment, check=True)
    for unit in ("edge-server", "edge-server@", "edge-server-plans"):
        drop_in = tmp_path / f"out/{unit}.service.d/50-devices.conf"
        assert str(drop_in.readlink()) == "/lists/any.conf"


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
        + "[grpc]\nport = 0\n[metrics]\nport = 0\n[http]\nport = 0\n"
    )
    daemon = Daemon(read_settings(config, {}), [lambda *_: let_go.wait(60)])
    with closing(NotifySocket(tmp_path)) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
        give_up.start()
        daemon.start(stop)
        try:
            daemon.pipelines[0].worker.deadline_s = 1
            with pytest.raises(StageStuck, match="lanes-road"):
                daemon.run(stop)
        finally:
            daemon.stop()
            # The restart is systemd's; here nobody waits for what hangs.
            still_hangs = daemon.pipelines[0].worker.alive
            let_go.set()
            give_up.cancel()
    assert still_hangs
    told = [systemd.said.get().partition("\n")[0] for _ in range(systemd.said.qsize())]
    assert told[0] == "READY=1"
    assert told[-1] == "STOPPING=1"
    assert set(told[1:-1]) == {"WATCHDOG=1"}


def _doctor(container: Container) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """All that it tells, and level and remedy of each check."""
    told = json.loads(container.run("edge-server", "doctor", "--json").stdout)
    return told, {each["name"]: [each["level"], each["remedy"]] for each in told["checks"]}
