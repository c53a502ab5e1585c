"""Identity and credentials: stable, distinct, and clear when they cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.board.board import Identity
from edge_server.mqtt.broker import faults_of, password_of
from edge_server.settings import Mqtt

if TYPE_CHECKING:
    from pathlib import Path


def machine(root: Path, machine_id: str, boot_id: str) -> Path:
    (root / "etc").mkdir(parents=True)
    (root / "etc/machine-id").write_text(machine_id + "\n")
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text(boot_id + "\n")
    return root


def test_the_client_id_outlives_a_boot_and_differs_between_machines(tmp_path: Path) -> None:
    first = Identity.of_this_host("d", "1", machine(tmp_path / "1", "a" * 32, "boot-1"))
    again = Identity.of_this_host("d", "1", machine(tmp_path / "2", "a" * 32, "boot-2"))
    clone = Identity.of_this_host("d", "1", machine(tmp_path / "3", "b" * 32, "boot-1"))
    assert first.client_id == again.client_id != clone.client_id
    assert (first.boot_id, again.boot_id) == ("boot-1", "boot-2")
    assert "aaaa" not in first.client_id, "machine-id must not leave the machine as it is"


def test_a_host_without_these_files_has_an_identity_too(tmp_path: Path) -> None:
    one, two = (Identity.of_this_host("d", "1", tmp_path) for _ in range(2))
    assert one.client_id == two.client_id
    assert one.boot_id


def test_the_password_is_read_anew_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "password"
    mqtt = Mqtt("localhost", username="edge", password_file=str(file))
    file.write_text("secret \n")
    assert password_of(mqtt) == "secret "
    file.write_text("changed")
    assert password_of(mqtt) == "changed"


@pytest.mark.parametrize(
    ("mqtt", "fault"),
    [
        (Mqtt(""), "mqtt: host must not be empty"),
        (Mqtt("broker", 0), "mqtt: port must be 1 to 65535, not 0"),
        (Mqtt("localhost", password_file="/"), "mqtt: password_file needs a username beside it"),  # noqa: S106
    ],
)
def test_settings_that_no_connection_can_have_are_named(mqtt: Mqtt, fault: str) -> None:
    assert faults_of(mqtt) == [fault]
