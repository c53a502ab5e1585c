"""A flashed board as firstboot finds it: a root file system and a disk with the data partition.

A simulation: the disk is an image on a loop device, the root file system a folder, and nothing
boots. Partition table, file system, keys, certificate request and `edge-server provision` are real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
FIRSTBOOT = CHECKOUT / "jetpack/overlay/usr/lib/edge-server-image/firstboot"
LINUX = "0FC63DAF-8483-4772-8E79-3D69D8477DE4"
# Kills the script, and what it started, before the command with that number of one step.
CUT = """
if [ "$0" = "$FIRSTBOOT" ]; then
    set -T
    commands=0
    step=$1
    [ "$step" = "$CUT_STEP" ] || CUT_AT=1000000
    trap 'commands=$((commands + 1)); [ "$commands" -lt "$CUT_AT" ] || kill -KILL 0' DEBUG
    trap 'echo "$step $commands" >>"$COUNTED"' EXIT
fi
"""
# `plan` and `health` need a board; what they say is part of the report alone.
EDGE_SERVER = """\
#!/bin/sh
case $1 in
# The copy of the stick's file has passwords.
provision) [ "$(stat -c %a "$2")" = 600 ] || exit 99
    exec {python} -m edge_server "$@" ;;
*) echo "$1: a stand-in" && exit ${{STAND_IN_CODE:-0}} ;;
esac
"""
# What the units of the image do: the settings are those of the data partition once it is mounted.
BOOT = """
PATH=$PATH:/usr/sbin:/sbin
run() { BASH_ENV=$CUT_ENV "$FIRSTBOOT" "$1" || exit; }
run data
mount --bind "$EDGE_ROOT/data/etc" "$EDGE_ROOT/etc/edge_server"
run identity
run report
"""


def skip_where_no_disk_can_be_made() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a loop device is mounted")
    for tool in ("losetup", "partx", "sfdisk", "mkfs.ext4", "mkfs.vfat", "mcopy", "ssh-keygen"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{tool} is missing: apt install fdisk e2fsprogs dosfstools mtools")
    if subprocess.run(["losetup", "-f"], capture_output=True, check=False).returncode:
        pytest.skip("no loop device is free here")


class FlashedBoard:
    """The folder of one board; `attach` before, `detach` after it runs."""

    def __init__(self, folder: Path, disk_mib: int = 96) -> None:
        self.root = folder / "root"
        self.disk = folder / "disk"
        self.stick = folder / "stick"
        self._stick_loop = "/nonexistent"
        self.counted = folder / "counted"
        self._folder = folder
        self._loop = ""
        for name in ("etc/ssh", "run", "usr/bin"):
            (self.root / name).mkdir(parents=True)
        shutil.copytree(CHECKOUT / "systemd", self.root / "etc/edge_server")
        settings = self.root / "etc/edge_server/edge-server.toml"
        settings.rename(settings.with_name("config.toml"))
        (self.root / "etc/machine-id").write_text("")
        (self.root / "etc/hostname").write_text("edge-server\n")
        tools = folder / "tools"
        tools.mkdir()
        (tools / "edge-server").write_text(EDGE_SERVER.format(python=sys.executable))
        (tools / "edge-server").chmod(0o755)
        (folder / "cut").write_text(CUT)
        # As flashed for a smaller disk: the table's backup is in the middle of this one.
        self.disk.touch()
        os.truncate(self.disk, 64 * 2**20)
        layout = (
            "label: gpt\n1: start=2048, size=8192, name=APP\n"
            f"17: size=65536, type={LINUX}, name=edge_data\n"
        )
        subprocess.run(["sfdisk", "--quiet", self.disk], input=layout, text=True, check=True)
        os.truncate(self.disk, disk_mib * 2**20)

    def attach(self) -> None:
        made = subprocess.run(
            ["losetup", "-f", "--show", self.disk], capture_output=True, text=True, check=True
        )
        self._loop = made.stdout.strip()
        # Those of an earlier disk on this loop device.
        subprocess.run(["partx", "--delete", self._loop], check=False, capture_output=True)
        subprocess.run(["partx", "--add", self._loop], check=True)

    def detach(self) -> None:
        subprocess.run(["partx", "--delete", self._loop], check=False, capture_output=True)
        subprocess.run(["losetup", "-d", self._loop], check=False, capture_output=True)
        self.pull_stick()

    @property
    def device(self) -> str:
        return f"{self._loop}p17"

    def put_on_stick(self, text: str | bytes, name: str = "edge-server.toml") -> None:
        self.stick.unlink(missing_ok=True)
        self.stick.touch()
        os.truncate(self.stick, 8 * 2**20)
        subprocess.run(
            ["mkfs.vfat", "-n", "EDGE-SETUP", self.stick], check=True, stdout=subprocess.DEVNULL
        )
        data = text if isinstance(text, bytes) else text.encode()
        source = self._folder / "on_stick"
        source.write_bytes(data)
        subprocess.run(["mcopy", "-i", self.stick, source, f"::{name}"], check=True)
        self.pull_stick()
        made = subprocess.run(
            ["losetup", "-f", "--show", self.stick], capture_output=True, text=True, check=True
        )
        self._stick_loop = made.stdout.strip()
        # As udev has it.
        shutil.chown(self._stick_loop, group="disk")
        Path(self._stick_loop).chmod(0o660)

    def pull_stick(self) -> None:
        if Path(self._stick_loop).exists():
            shutil.chown(self._stick_loop, group="root")
            Path(self._stick_loop).chmod(0o600)
        subprocess.run(["losetup", "-d", self._stick_loop], check=False, capture_output=True)
        self._stick_loop = "/nonexistent"

    def boot(
        self, *, cut: tuple[str, int] = ("", 0), stand_in_code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run the steps of a boot in mounts of their own; then the data partition is in `data`."""
        environment = {
            **os.environ,
            "PATH": f"{self._folder / 'tools'}:{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "EDGE_ROOT": str(self.root),
            "EDGE_DATA_DEVICE": self.device if self._loop else "/nonexistent",
            "EDGE_STICK": self._stick_loop,
            "EDGE_SLOTS": str(self._folder / "slots"),
            "FIRSTBOOT": str(FIRSTBOOT),
            "CUT_ENV": str(self._folder / "cut"),
            "CUT_STEP": cut[0],
            "CUT_AT": str(cut[1]),
            "COUNTED": str(self.counted),
            "STAND_IN_CODE": str(stand_in_code),
        }
        # A group of its own, which a power cut ends as a whole.
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", BOOT],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Mode and content of each file of the root file system and the data partition."""
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        script = 'mkdir -p "$1/data" && mount -o ro "$0" "$1/data" && cp -a "$1" "$2"'
        if not self._loop:
            script = 'cp -a "$1" "$2"'
        subprocess.run(
            ["unshare", "--mount", "bash", "-c", script, self.device, self.root, copy], check=True
        )
        return {
            str(path.relative_to(copy / "root")): (path.stat().st_mode & 0o7777, path.read_bytes())
            for path in sorted((copy / "root").rglob("*"))
            if path.is_file() and "lost+found" not in path.parts
        }
