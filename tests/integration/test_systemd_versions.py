"""The shipped units under the systemd of JetPack 6 (249) and of JetPack 7 (255), booted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.systemd_machine import (
    CONFIG,
    SHIPPED_MODELS,
    Container,
    Unit,
    checkout_binds,
    install_units,
    make_root,
    skip_where_no_container_can_be_made,
)
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ubuntu's suite and its systemd.
SUITES = {"jammy": "249", "noble": "255"}
ROAD = f"""
[repository]
paths = ["{SHIPPED_MODELS}"]
[cameras.road]
uri = "synthetic://road?seed=7&fps=10"
"""
UNITS = ("edge-server", "edge-server@rear", "edge-server-plans", "edge-server-power")

pytestmark = [pytest.mark.serial, pytest.mark.long]


@pytest.fixture(scope="module", params=SUITES)
def unit(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Unit]:
    skip_where_no_container_can_be_made()
    root = make_root(f"{request.param}-amd64")
    booted = Container(tmp_path_factory.mktemp("systemd"), *checkout_binds(), root=root)
    try:
        booted.wait_until_up()
        version = booted.do("systemctl", "--version").split()[1]
        assert version == SUITES[request.param]
        install_units(booted, tmp_path_factory.mktemp("root"))
        unit = Unit(booted)
        yield unit
        print(*(f"{us / 1e6:10.3f} {text}" for us, text in unit.journal()), sep="\n")
    finally:
        booted.close()


def test_it_knows_every_word_of_the_units(unit: Unit) -> None:
    for name in UNITS:
        said = unit.container.run("systemd-analyze", "verify", f"{name}.service").stderr
        assert "edge-server" not in said, said
    unit.container.write("/etc/systemd/system/edge-server-x.service", "[Service]\nExecStrat=/x\n")
    assert (
        "ExecStrat"
        in unit.container.run("systemd-analyze", "verify", "edge-server-x.service").stderr
    )


def test_it_starts_reloads_and_restarts_them_in_their_sandbox(unit: Unit) -> None:
    container = unit.container
    assert unit.start_with(ROAD) == 0
    status = container.do("cat", f"/proc/{unit['MainPID']}/status")
    numbers = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (numbers["NoNewPrivs"], numbers["Seccomp"]) == ("1", "2")
    assert int(numbers["CapBnd"], 16) == 0
    rear = '[cameras.rear]\nuri = "synthetic://road?seed=3&fps=5"\n'
    container.write(CONFIG, ROAD + rear)
    container.do("systemctl", "reload", "edge-server")
    wait_until(lambda: any("camera rear: live" in text for _, text in unit.journal()))
    # KILL: a crash. STOP: a hang, which the watchdog ends.
    for signal in ("KILL", "STOP"):
        before = unit["MainPID"]
        unit.kill(signal)
        wait_until(lambda before=before: unit.restarted(before))
    container.do("systemctl", "stop", "edge-server")
    assert (unit["ActiveState"], unit["Result"]) == ("inactive", "success")


def test_its_credentials_reach_the_daemon(unit: Unit) -> None:
    container = unit.container
    container.write("/root/mqtt_password", "sesame")
    container.write(
        "/etc/systemd/system/edge-server.service.d/secrets.conf",
        "[Service]\nLoadCredential=mqtt_password:/root/mqtt_password\n",
    )
    container.do("systemctl", "daemon-reload")
    path = "/run/credentials/edge-server.service/mqtt_password"
    mqtt = f'[mqtt]\nhost = "127.0.0.1"\nusername = "truck"\npassword_file = "{path}"\n'
    assert unit.start_with(ROAD + mqtt) == 0


def test_its_generator_and_its_catalog_work(unit: Unit) -> None:
    container = unit.container
    container.write("/etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1\n")
    container.do("systemctl", "daemon-reload")
    assert "/dev/nvmap rw" in unit["DeviceAllow"]
    assert "does not serve" in container.do("journalctl", "--list-catalog")
