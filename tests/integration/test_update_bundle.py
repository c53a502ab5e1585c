"""RAUC bundles: built, verified and installed with the real tool, on a simulated Jetson."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.simulated_jetson.board import COMPATIBLE, Board, make_bundle, make_image, make_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (shutil.which("rauc") and shutil.which("dbus-run-session")),
    reason="apt install rauc dbus squashfs-tools e2fsprogs",
)


class Release(NamedTuple):
    keys: tuple[Path, Path]
    old: Path
    new: Path
    bundle: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    keys = make_keys(folder, "release")
    old, new = make_image(folder, "1.0"), make_image(folder, "2.0")
    return Release(keys, old, new, make_bundle(folder, new, keys))


@pytest.fixture
def board(tmp_path: Path, release: Release) -> Iterator[Board]:
    made = Board(tmp_path / "device", release.old, release.keys[0])
    yield made
    made.unmount()


def test_an_installed_bundle_boots_from_the_other_slot_and_knows_its_root(
    board: Board, release: Release
) -> None:
    before = board.digest("A")
    done = board.rauc("install", str(release.bundle))
    assert done.returncode == 0, done.stderr
    assert board.digest("A") == before
    assert board.file("B", "/version") == "2.0"
    kernel = board.file("B", "/boot/extlinux/extlinux.conf")
    assert "      APPEND ${cbootargs} rw rootwait root=PARTUUID=0000000b-02 rauc.slot=B" in kernel
    assert kernel.count("root=") == 1
    assert (board.record.state, board.record.target, board.record.engine) == (
        "pending",
        "B",
        "rauc",
    )
    assert board.firmware.boot() == "B"
    assert board.is_whole("B")
    status = board.rauc("status", "--output-format=shell", booted="B").stdout
    assert "RAUC_BOOT_PRIMARY='rootfs.1'" in status
    assert "RAUC_SLOT_BOOT_STATUS_1='good'" in status
    assert "on trial" in board.rauc("status", "mark-good", booted="B").stderr
    assert board.firmware.tries("B") < 3
    back = board.rauc("status", "mark-active", "other", booted="B")
    assert back.returncode == 0, back.stderr
    assert board.firmware.boot() == "A"


def test_a_bundle_of_another_key_another_board_or_other_bytes_changes_nothing(
    board: Board, release: Release, tmp_path: Path
) -> None:
    strange = make_bundle(tmp_path, release.new, make_keys(tmp_path, "stranger"))
    other = make_bundle(tmp_path, release.new, release.keys, compatible=f"{COMPATIBLE}-2")
    changed = tmp_path / "changed.raucb"
    data = bytearray(release.bundle.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    before = board.digest("B")
    for bundle, reason in (
        (strange, "signature verification failed"),
        (other, "Compatible mismatch"),
        (changed, "verif"),
    ):
        refused = board.rauc("install", str(bundle))
        assert refused.returncode != 0
        assert reason in refused.stdout + refused.stderr
        assert board.digest("B") == before
        assert board.record.state == "none"
        assert board.firmware.boot() == "A"


def test_a_board_without_slots_refuses_before_anything_is_written(
    board: Board, release: Release
) -> None:
    before = board.digest("B")
    board.firmware.write("RootfsRedundancyLevel", 0)
    refused = board.rauc("install", str(release.bundle))
    assert refused.returncode != 0
    assert "ROOTFS_AB=1" in refused.stderr
    assert board.digest("B") == before


def test_the_format_that_devices_get_is_built_and_every_byte_of_it_is_verified(
    release: Release, tmp_path: Path
) -> None:
    bundle = make_bundle(tmp_path, release.new, release.keys, form="verity")
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    command = ["rauc", "extract", "--keyring", release.keys[0], bundle, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
