"""The units of the commit under a real systemd: the verdict, and the reboot where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.systemd_machine import Container, skip_where_no_container_can_be_made
from support.waiting import wait_until

from edge_server.board.update import RecordFile, UpdateRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.early

UPDATE = Path(__file__).parents[2] / "jetpack" / "update"
RECORD = "/var/lib/edge_server/update/record.json"
# In the order of PATH that systemd gives to services.
STUBS = {
    "/usr/bin/edge-server": 'for word; do echo "$word"; done >/run/called\nexit $(cat /run/code)',
    "/usr/local/sbin/nvbootctrl": "case $1 in verify) echo >/run/verified ;; *) echo 0 ;; esac",
    "/usr/local/sbin/systemctl": 'echo "$@" >/run/rebooted',
}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Container]:
    skip_where_no_container_can_be_made()
    container = Container(tmp_path)
    try:
        container.wait_until_up()
        for path, script in STUBS.items():
            container.write(path, f"#!/bin/sh\n{script}\n")
            container.do("chmod", "755", path)
        container.write("/usr/lib/edge-server-update/guard", (UPDATE / "guard").read_text())
        container.do("chmod", "755", "/usr/lib/edge-server-update/guard")
        for unit in ("verify", "commit", "rollback"):
            name = f"edge-server-{unit}.service"
            container.write(f"/etc/systemd/system/{name}", (UPDATE / name).read_text())
        container.write(
            "/etc/edge_server/commit.env",
            'REQUIRE="--require lanes:front --require mqtt"\nWAIT=20\nSTABLE=5\n',
        )
        container.do("/usr/bin/systemctl", "daemon-reload")
        yield container
    finally:
        container.close()


def commit(machine: Container, code: int, record: UpdateRecord, folder: Path) -> str:
    """Start the commit as a boot does; the state of the unit."""
    RecordFile(folder).write(record)
    machine.write(RECORD, (folder / "update/record.json").read_text())
    machine.write("/run/code", f"{code}\n")
    machine.run("rm", "-f", "/run/rebooted")
    machine.run("/usr/bin/systemctl", "reset-failed")
    machine.run("/usr/bin/systemctl", "restart", "edge-server-commit.service")
    command = ("/usr/bin/systemctl", "is-active", "edge-server-commit.service")
    return machine.run(*command).stdout.strip()


def test_a_system_on_trial_that_is_not_kept_is_rebooted_and_no_other(
    machine: Container, tmp_path: Path
) -> None:
    trial = UpdateRecord("pending", "A", "B")
    assert commit(machine, 0, trial, tmp_path) == "active"
    called = machine.do("cat", "/run/called").split()
    wanted = "update commit --wait 20 --stable 5 --require lanes:front --require mqtt"
    assert called == wanted.split()
    assert machine.run("test", "-e", "/run/rebooted").returncode
    machine.do("/usr/bin/systemctl", "start", "edge-server-verify.service")
    assert machine.run("test", "-e", "/run/verified").returncode

    for code in (69, 1, 139):  # unhealthy, or a Python that does not even start
        assert commit(machine, code, trial, tmp_path) == "failed"
        wait_until(lambda: machine.run("cat", "/run/rebooted").stdout == "reboot\n")

    assert commit(machine, 69, UpdateRecord("committed", "A", "B"), tmp_path) == "failed"
    state = ("/usr/bin/systemctl", "show", "-P", "ExecMainExitTimestamp")
    wait_until(lambda: machine.do(*state, "edge-server-rollback.service") != "")
    log = ("journalctl", "-u", "edge-server-rollback", "--output=cat", "--no-pager")
    wait_until(lambda: "slot A is not on trial" in machine.do(*log))
    assert machine.run("test", "-e", "/run/rebooted").returncode
    machine.do("/usr/bin/systemctl", "restart", "edge-server-verify.service")
    assert machine.run("test", "-e", "/run/verified").returncode == 0
