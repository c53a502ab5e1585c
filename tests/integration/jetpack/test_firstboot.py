"""What firstboot leaves on a board, where it is run again, loses power, or finds something else.

The board is a simulation, see flashed_board; partition table, file system, keys, certificate
request and `edge-server provision` are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.flashed_board import FIRSTBOOT, FlashedBoard, skip_where_no_disk_can_be_made

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.early

SETUP = """
[device]
id = "truck-17"
[mqtt]
host = "127.0.0.1"
username = "truck-17"
password = "it's a \\"secret\\""
[ssh]
keys = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0Zq3uJ4rUGkV9BWkzXJ0nUo0gJ0cW4X1Yl3H0F3Z5m me"]
[wifi]
ssid = "depot"
password = "long enough"
[cameras.front]
uri = "synthetic://road?seed=7&fps=10"
"""
IDENTITY = (
    "data/identity/machine-id",
    "data/identity/ssh_host_ed25519_key",
    "data/identity/device.key",
)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[FlashedBoard]:
    skip_where_no_disk_can_be_made()
    board = FlashedBoard(tmp_path)
    board.attach()
    yield board
    board.detach()


def booted(board: FlashedBoard) -> dict[str, tuple[int, bytes]]:
    done = board.boot()
    assert done.returncode == 0, done.stderr
    return board.files()


def text_of(files: dict[str, tuple[int, bytes]], name: str) -> str:
    return files[name][1].decode().strip()


def check_whole(board: FlashedBoard, files: dict[str, tuple[int, bytes]], device: str) -> None:
    """Every step is done, and its results fit each other."""
    assert text_of(files, "etc/machine-id") == text_of(files, "data/identity/machine-id")
    assert len(text_of(files, "etc/machine-id")) == 32
    assert text_of(files, "etc/hostname") == text_of(files, "data/identity/device-id") == device
    for name, mode in (("ssh_host_ed25519_key", 0o600), ("ssh_host_ed25519_key.pub", 0o644)):
        assert files[f"etc/ssh/{name}"] == files[f"data/identity/{name}"]
        assert files[f"etc/ssh/{name}"][0] == mode
    assert files["data/identity/device.key"][0] == 0o640
    request = subprocess.run(
        ["openssl", "req", "-noout", "-verify", "-subject", "-pubkey"],
        input=files["data/identity/device.csr"][1],
        capture_output=True,
        check=True,
    ).stdout
    key = subprocess.run(
        ["openssl", "pkey", "-pubout"],
        input=files["data/identity/device.key"][1],
        capture_output=True,
        check=True,
    ).stdout
    assert key in request
    assert f"CN = {device}".encode() in request
    table = subprocess.run(
        ["sfdisk", "--list-free", "--quiet", board.disk], capture_output=True, text=True, check=True
    ).stdout
    assert not table.strip(), f"space is left behind the data partition: {table}"
    assert f"device: {device}" in text_of(files, "data/report")


def test_a_second_boot_changes_nothing(board: FlashedBoard) -> None:
    first = booted(board)
    device = text_of(first, "data/identity/device-id")
    assert device.startswith("edge-")
    check_whole(board, first, device)
    assert "provisioned: no" in text_of(first, "data/report")
    assert booted(board) == first


def test_a_stick_provisions_once_and_takes_the_certificate_request(board: FlashedBoard) -> None:
    board.put_on_stick(SETUP)
    files = booted(board)
    check_whole(board, files, "truck-17")
    assert files["data/etc/mqtt_password"] == (0o640, b'it\'s a "secret"')
    assert files["data/network/provisioned.nmconnection"][0] == 0o600
    assert files["run/NetworkManager/system-connections/provisioned.nmconnection"][0] == 0o600
    assert text_of(files, "data/ssh/edge").startswith("ssh-ed25519 ")
    on_stick = subprocess.run(
        ["mtype", "-i", board.stick, "::truck-17.csr"], capture_output=True, check=True
    ).stdout
    assert on_stick == files["data/identity/device.csr"][1]
    assert booted(board) == files

    board.put_on_stick(SETUP.replace("truck-17", "truck-18"))
    refused = board.boot()
    assert refused.returncode == 0
    assert "provisioned already" in refused.stderr
    assert board.files() == files

    board.pull_stick()
    assert booted(board) == files


def test_what_somebody_put_on_a_stick_stops_no_boot(board: FlashedBoard) -> None:
    plain = booted(board)
    board.put_on_stick("[device]\nid = '$(touch /tmp/owned)'\n")
    done = board.boot()
    assert done.returncode == 0
    assert "device.id" in done.stderr
    assert board.files() == plain
    board.put_on_stick(b"x" * 3_000_000)
    assert board.boot().returncode == 0
    assert board.files() == plain
    board.put_on_stick("nothing to set up", name="readme.txt")
    assert "has no edge-server.toml" in board.boot().stdout
    assert board.files() == plain


def test_the_other_slot_gets_the_same_identity(board: FlashedBoard) -> None:
    """An update brings a root file system as it was built: with no identity, and other settings."""
    board.put_on_stick(SETUP)
    before = booted(board)
    board.pull_stick()
    for name in ("etc/machine-id", "etc/hostname"):
        (board.root / name).chmod(0o644)
    (board.root / "etc/machine-id").write_text("")
    (board.root / "etc/hostname").write_text("edge-server\n")
    for key in (board.root / "etc/ssh").iterdir():
        key.unlink()
    (board.root / "etc/edge_server/config.toml").write_text("# of the new image\n")
    after = booted(board)
    check_whole(board, after, "truck-17")
    assert {n: f for n, f in after.items() if n.startswith("data/")} == {
        n: f for n, f in before.items() if n.startswith("data/")
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files get other owners")
def test_the_state_belongs_to_the_daemon_whatever_its_number_in_the_new_image(
    tmp_path: Path,
) -> None:
    """systemd leaves what lies in a state directory as it is where the directory's owner fits."""
    data, numbers = tmp_path / "root/data", tmp_path / "numbers"
    getent = tmp_path / "getent"
    getent.write_text(f"#!/bin/sh\necho edge-server:x:$(cat {numbers})::/:/bin/false\n")
    getent.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "EDGE_ROOT": str(tmp_path / "root"),
        "EDGE_DATA_DEVICE": "/nonexistent",
    }

    def boot_image(with_numbers: str) -> None:
        numbers.write_text(with_numbers)
        subprocess.run([FIRSTBOOT, "data"], env=environment, check=True, capture_output=True)

    boot_image("3997:3996")
    state, record = data / "edge_server/store/copy", data / "edge_server/update"
    state.mkdir(parents=True)
    record.mkdir()
    secret, link = data / "etc/camera", state / "link"
    secret.touch()
    link.symlink_to(tmp_path)
    for path in (data / "edge_server", state.parent, state, link):
        os.chown(path, 3997, 3996, follow_symlinks=False)
    os.chown(secret, 0, 3996)
    boot_image("3500:3501")
    for path in (data / "edge_server", state.parent, state, link):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (3500, 3501), path
    assert (secret.stat().st_uid, secret.stat().st_gid) == (0, 3501)
    assert record.stat().st_uid == tmp_path.stat().st_uid == 0


def test_power_may_go_before_any_command(board: FlashedBoard, tmp_path: Path) -> None:
    """After a cut the next boot completes what is missing, and keeps the identity that was made."""
    board.put_on_stick(SETUP)
    complete = set(booted(board))
    lengths = [line.split() for line in board.counted.read_text().splitlines()]
    every = 1 if os.environ.get("EDGE_CRASH_POINTS") == "all" else 163
    cuts = [
        (step, at)
        for step, length in lengths
        for at in range(min(int(length), every // 2 + 1), int(length) + 1, every)
    ]
    assert {step for step, _ in cuts} == {"data", "identity", "report"}
    for cut in cuts:
        folder = tmp_path / f"cut_{cut[0]}_{cut[1]}"
        folder.mkdir()
        other = FlashedBoard(folder)
        other.attach()
        try:
            other.put_on_stick(SETUP)
            assert other.boot(cut=cut).returncode == -signal.SIGKILL, cut
            made = (
                {name: file for name, file in other.files().items() if name in IDENTITY and file[1]}
                if formatted(other)
                else {}
            )
            files = booted(other)
            check_whole(other, files, "truck-17")
            assert {name: files[name] for name in made} == made
            assert {name for name in files if not name.endswith((".new", ".made"))} == complete
            assert booted(other) == files
        finally:
            other.detach()


def formatted(board: FlashedBoard) -> bool:
    command = ["/usr/sbin/blkid", "-p", "-s", "TYPE", "-o", "value", board.device]
    return bool(subprocess.run(command, capture_output=True, check=False).stdout)


def test_a_damaged_begin_is_repaired_and_not_formatted(board: FlashedBoard) -> None:
    before = booted(board)
    with open(board.device, "r+b") as device:  # noqa: PTH123 - a block device
        device.write(bytes(4096))
    done = board.boot()
    assert done.returncode == 0, done.stderr
    assert "formatting" not in done.stdout
    assert board.files() == before


def test_a_file_system_of_somebody_else_is_not_touched(board: FlashedBoard) -> None:
    subprocess.run(["mkfs.vfat", board.device], check=True, stdout=subprocess.DEVNULL)
    done = board.boot()
    assert done.returncode == 1
    assert "holds vfat, which nobody here made; not touched" in done.stderr


def test_without_a_data_partition_the_root_file_system_has_the_state(tmp_path: Path) -> None:
    skip_where_no_disk_can_be_made()
    board = FlashedBoard(tmp_path)
    done = board.boot()
    assert done.returncode == 0, done.stderr
    assert "an image update loses it" in done.stdout
    assert (board.root / "data/identity/device.csr").exists()


def test_the_report_names_what_failed(board: FlashedBoard) -> None:
    done = board.boot(stand_in_code=69)
    assert done.returncode == 0
    report = text_of(board.files(), "data/report")
    assert "plans: failed (69): plan: a stand-in" in report
    assert "health: failed (69): health: a stand-in" in report
