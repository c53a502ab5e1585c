"""flash.sh and fetch_bsp.sh on a mock of Linux_for_Tegra: their commands, and what they refuse."""

from __future__ import annotations

import hashlib
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.mock_linux_for_tegra import MockLinuxForTegra

JETPACK = Path(__file__).parents[3] / "jetpack"
QSPI = "'-c bootloader/generic/cfg/flash_t234_qspi.xml'"
AB = "ROOTFS_AB=1 ROOTFS_RETRY_COUNT_MAX=3 "
SCRIPT = "./tools/kernel_flash/l4t_initrd_flash.sh"
LAYOUT = "tools/kernel_flash/edge_server_flash_l4t_t234_nvme_rootfs_ab.xml"


@pytest.fixture
def tree(tmp_path: Path) -> MockLinuxForTegra:
    return MockLinuxForTegra(tmp_path)


def flash(
    tree: MockLinuxForTegra, *arguments: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [JETPACK / "flash.sh", *arguments, "--tree", tree.path],
        env={**os.environ, "EDGE_SYSFS": str(tree.sysfs), "MOCK_CODE": str(code)},
        capture_output=True,
        text=True,
        check=False,
    )


def commands(tree: MockLinuxForTegra, *arguments: str) -> list[str]:
    """What a dry run prints for NVIDIA's scripts; it is the same twice, and writes nothing."""
    before = tree.files()
    done = flash(tree, *arguments, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert flash(tree, *arguments, "--dry-run").stdout == done.stdout
    assert tree.files() == before
    assert tree.calls() == []
    layout, change, *rest = done.stdout.splitlines()
    assert "data_partition.py" in layout
    assert change == f"cd {tree.path}"
    return rest


def test_a_board_with_nvme_and_two_slots(tree: MockLinuxForTegra) -> None:
    assert commands(tree, "--board", "orin-nano") == [
        f"sudo {AB}{SCRIPT} -p {QSPI} --no-flash --showlogs --network usb0 "
        "jetson-orin-nano-devkit internal",
        f"sudo {AB}{SCRIPT} --no-flash --external-device nvme0n1p1 -c {LAYOUT} --external-only "
        "--append --showlogs --network usb0 jetson-orin-nano-devkit external",
        f"sudo {SCRIPT} --flash-only --showlogs --network usb0",
    ]


def test_sd_card_one_slot_and_sizes(tree: MockLinuxForTegra) -> None:
    options = ("--storage", "sd", "--no-ab", "--app-size", "12GiB", "--disk-sectors", "60000000")
    printed = commands(tree, "--board", "orin-nano-super", *options)
    assert all("ROOTFS_AB" not in line for line in printed)
    assert "-S 12GiB" in printed[1]
    assert "--external-device mmcblk1p1" in printed[1]
    assert "edge_server_flash_l4t_t234_nvme.xml" in printed[1]
    assert "jetson-orin-nano-devkit-super" in printed[1]


def test_emmc(tree: MockLinuxForTegra) -> None:
    assert commands(tree, "--board", "agx-orin", "--storage", "emmc") == [
        f"sudo {AB}{SCRIPT} -p '-c bootloader/generic/cfg/"
        "edge_server_flash_t234_qspi_sdmmc_rootfs_ab.xml' --showlogs --network usb0 "
        "jetson-agx-orin-devkit internal"
    ]


def test_encryption_secure_boot_and_mass_flash(tree: MockLinuxForTegra) -> None:
    keys = ("--encrypt", "/keys/ekb", "--pkc", "/keys/pkc.pem", "--sbk", "/keys/sbk")
    mass = ("--mass", "4", "--module", "0005", "--fab", "500")
    printed = commands(tree, "--board", "agx-orin", *keys, *mass)
    module = "BOARDID=3701 BOARDSKU=0005 FAB=500 BOARDREV= "
    assert len(printed) == 2
    for line in printed:
        assert line.startswith(
            f"sudo {module}{AB}ROOTFS_ENC=1 {SCRIPT} -u /keys/pkc.pem -v /keys/sbk"
        )
    assert "-p '-i /keys/ekb'" in printed[1]
    assert "nvme_rootfs_ab_enc.xml" in printed[1]
    assert "--massflash 4" in printed[1]
    only = flash(tree, "--board", "agx-orin", "--flash-only", "4", "--dry-run")
    assert only.stdout == f"sudo {SCRIPT} --flash-only --massflash 4 --network usb0 --showlogs\n"


def test_jetpack_7_has_its_script_elsewhere(tmp_path: Path) -> None:
    tree = MockLinuxForTegra(tmp_path, "39.2.0")
    printed = commands(tree, "--board", "orin-nx", "--jetpack", "7.2")
    assert all("./l4t_initrd_flash.sh" in line and "--network" not in line for line in printed)


def needs_root_on_x86() -> None:
    if os.geteuid() != 0 or os.uname().machine != "x86_64":
        pytest.skip("needs root on x86-64, as NVIDIA's scripts do")


def test_the_flash_is_what_the_dry_run_printed(tree: MockLinuxForTegra) -> None:
    needs_root_on_x86()
    tree.connect()
    printed = commands(tree, "--board", "orin-nano")
    for _ in range(2):
        done = flash(tree, "--board", "orin-nano")
        assert done.returncode == 0, done.stderr
    called = tree.calls()
    assert called[:3] == called[3:]
    assert [line.replace("'", "") for line in called[:3]] == [
        line.removeprefix("sudo ").replace("'", "") for line in printed
    ]
    patched = ET.parse(tree.path / LAYOUT)  # noqa: S314 - of this test
    assert any(p.get("name") == "edge_data" for p in patched.iter("partition"))


@pytest.mark.parametrize(
    ("broken", "text", "fault"),
    [
        ("rootfs/boot/Image", "another kernel", "kernel/Image and rootfs/boot/Image differ"),
        ("rootfs/boot/initrd", "", "rootfs/boot/initrd: missing or empty"),
        ("bootloader/l4t_initrd.img", "", "bootloader/l4t_initrd.img: missing or empty"),
        ("rootfs/etc/nv_tegra_release", "", "run apply_binaries.sh"),
        (
            "rootfs/etc/nv_tegra_release",
            "# R36 (release), REVISION: 4.4, GCID: 1\n",
            "is L4T 36.4.4; JetPack 6.2.2 has 36.5.0",
        ),
        ("rootfs/etc/machine-id", "0123", "has an identity that every board would share"),
        ("rootfs/etc/ssh/ssh_host_ed25519_key", "key", "has an identity that every board would"),
        ("rootfs/etc/shadow", "root:!::\nnvidia:$6$x:\n", "user nvidia has a password"),
        ("rootfs/etc/shadow", "root::20000:\n", "user root has a password, or none at all"),
        ("jetson-orin-nano-devkit.conf", "", "jetson-orin-nano-devkit.conf: missing or empty"),
        ("rootfs/usr/lib/edge-server-image/firstboot", "", "is not customised"),
    ],
)
def test_faults_of_the_tree_come_before_the_flash(
    tree: MockLinuxForTegra, broken: str, text: str, fault: str
) -> None:
    tree.write(broken, text)
    for dry in ((), ("--dry-run",)):
        done = flash(tree, "--board", "orin-nano", *dry)
        assert done.returncode == 1
        assert fault in done.stderr
    assert tree.calls() == []


@pytest.mark.parametrize(
    ("board_id", "sku", "fault"),
    [
        ("3767", "0005", ""),
        # Production modules leave fields empty.
        ("3767", "", ""),
        ("", "", ""),
        ("3701", "0005", "the board is a p3701-0005, and orin-nano is p3767"),
        ("3767", "0000", "the module is a p3767-0000, and orin-nano is one of 0003,0004,0005"),
    ],
)
def test_another_board_is_not_flashed(
    tree: MockLinuxForTegra, board_id: str, sku: str, fault: str
) -> None:
    needs_root_on_x86()
    tree.connect()
    tree.eeprom(board_id, sku)
    done = flash(tree, "--board", "orin-nano")
    assert fault in done.stderr
    assert done.returncode == (1 if fault else 0)
    assert len(tree.calls()) == (0 if fault else 3)


def test_one_board_in_recovery_mode_is_needed(tree: MockLinuxForTegra) -> None:
    needs_root_on_x86()
    assert "0 boards in recovery mode" in flash(tree, "--board", "orin-nano").stderr
    tree.connect(port="1-1")
    # Linux runs on it: L4T's own USB device is 7020.
    tree.connect(product="7020", port="1-2")
    assert flash(tree, "--board", "orin-nano", "--check-board").returncode == 0
    tree.connect(port="1-3")
    assert "2 boards in recovery mode" in flash(tree, "--board", "orin-nano").stderr


def test_a_failure_of_nvidias_script_ends_the_flash(tree: MockLinuxForTegra) -> None:
    needs_root_on_x86()
    tree.connect()
    done = flash(tree, "--board", "orin-nano", code=3)
    assert done.returncode == 1
    assert "its messages are above" in done.stderr
    assert len(tree.calls()) == 1


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((), "--board is missing"),
        (("--board", "orin"), "--board orin: not in versions.env"),
        (("--board", "orin-nx", "--storage", "emmc"), "orin-nx boots from nvme"),
        (("--board", "orin-nx", "--mass", "$(id)"), "give a whole number"),
        (("--board", "orin-nx", "--module", "0005"), "--module 0005: orin-nx has 0000,0001"),
        (("--board", "orin-nx", "--sbk", "x"), "--sbk needs --pkc"),
        (("--board", "orin-nx", "--pkc", "/no/key"), "--pkc /no/key: there is no such key file"),
        (("--board", "agx-orin", "--storage", "emmc", "--encrypt", "x"), "on NVMe only"),
        (("--bord", "orin-nx"), "--bord: unknown"),
    ],
)
def test_wrong_arguments(tree: MockLinuxForTegra, arguments: tuple[str, ...], fault: str) -> None:
    done = flash(tree, *arguments)
    assert done.returncode == 1
    assert fault in done.stderr


class Served:
    """Two archives, as NVIDIA would serve them, and a versions.env that names them."""

    def __init__(self, folder: Path, sha256: str = "-") -> None:
        self.folder = folder
        (folder / "served").mkdir()
        for name in ("bsp.tbz2", "rootfs.tbz2"):
            (folder / "served" / name).write_bytes(name.encode() * 100_000)
        bsp = hashlib.sha256((folder / "served/bsp.tbz2").read_bytes()).hexdigest()
        row = f"6.9 36.9 jammy file://{folder}/served bsp.tbz2 {sha256 or bsp} rootfs.tbz2 -"
        text = (JETPACK / "versions.env").read_text()
        (folder / "versions.env").write_text(f'{text}\nRELEASES="\n{row}\n"\n')

    def serve_archives(self) -> None:
        """A BSP whose scripts write down that they ran, and a root file system."""
        bsp, rootfs = self.folder / "bsp/Linux_for_Tegra", self.folder / "a_root"
        for name in ("apply_binaries.sh", "tools/l4t_flash_prerequisites.sh"):
            (bsp / name).parent.mkdir(parents=True, exist_ok=True)
            (bsp / name).write_text(f'#!/bin/sh\necho {name} >>"$PWD/ran"\nexit $MOCK_CODE\n')
            (bsp / name).chmod(0o755)
        for folder in (bsp / "rootfs", rootfs / "etc"):
            folder.mkdir(parents=True)
        (rootfs / "etc/hostname").write_text("tegra-ubuntu\n")
        for archive, folder in (("bsp", bsp.parent), ("rootfs", rootfs)):
            made = self.folder / "served" / f"{archive}.tbz2"
            subprocess.run(["tar", "-cjf", made, "-C", folder, "."], check=True)

    def fetch(self, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [JETPACK / "fetch_bsp.sh", "6.9", "--into", self.folder / "into", *options],
            env={
                **os.environ,
                "EDGE_VERSIONS": str(self.folder / "versions.env"),
                "EDGE_PINS": str(self.folder / "pins"),
                "MOCK_CODE": str(code),
            },
            capture_output=True,
            text=True,
            check=False,
        )


def test_a_download_is_resumed_verified_and_not_repeated(tmp_path: Path) -> None:
    served = Served(tmp_path, sha256="")
    (tmp_path / "into").mkdir()
    whole = (tmp_path / "served/bsp.tbz2").read_bytes()
    (tmp_path / "into/bsp.tbz2.part").write_bytes(whole[:12345])
    done = served.fetch()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "into/bsp.tbz2").read_bytes() == whole
    pins = (tmp_path / "pins").read_text()
    assert pins.split()[1::2] == ["rootfs.tbz2"], "a published checksum is not pinned"
    # Cut off between the last byte and the file's name.
    (tmp_path / "into/bsp.tbz2").rename(tmp_path / "into/bsp.tbz2.part")
    done = served.fetch()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "into/bsp.tbz2").read_bytes() == whole
    for name in ("bsp.tbz2", "rootfs.tbz2"):
        (tmp_path / "served" / name).unlink()
    assert served.fetch().returncode == 0
    assert (tmp_path / "pins").read_text() == pins


def test_a_wrong_checksum_is_refused_and_the_first_one_pinned(tmp_path: Path) -> None:
    served = Served(tmp_path)
    assert "nobody vouches for this first download" in served.fetch().stderr
    (tmp_path / "into/rootfs.tbz2").write_bytes(b"changed")
    done = served.fetch()
    assert done.returncode == 1
    assert "kept as" in done.stderr
    assert not (tmp_path / "into/rootfs.tbz2").exists()


def test_unpacking_ends_with_nvidias_own_steps_and_starts_anew_after_a_failure(
    tmp_path: Path,
) -> None:
    needs_root_on_x86()
    served = Served(tmp_path)
    served.serve_archives()
    tree = tmp_path / "into/6.9/Linux_for_Tegra"
    failed = served.fetch("--unpack", code=3)
    assert failed.returncode == 1
    assert "NVIDIA's apply_binaries.sh failed" in failed.stderr
    done = served.fetch("--unpack")
    assert done.stdout == f"{tree}\n"
    assert (tree / "rootfs/etc/hostname").read_text() == "tegra-ubuntu\n"
    ran = "tools/l4t_flash_prerequisites.sh\napply_binaries.sh\n"
    assert (tree / "ran").read_text() == ran
    assert "is there already" in served.fetch("--unpack").stderr
    assert (tree / "ran").read_text() == ran


def test_an_unknown_jetpack(tmp_path: Path) -> None:
    done = subprocess.run(
        [JETPACK / "fetch_bsp.sh", "5.1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "JetPack 5.1: not in versions.env" in done.stderr
