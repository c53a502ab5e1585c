"""A simulated board on which RAUC runs: file slots, the firmware's stand-in, PATH and settings."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from edge_server.board.update import RecordFile, UpdateRecord
from support.simulated_jetson.firmware import Firmware

HERE = Path(__file__).parent
UPDATE = HERE.parents[2] / "jetpack" / "update"
COMPATIBLE = "edge-server-simulated"
TIMEOUT_S = 60.0
PARTITIONS = {"A": "APP", "B": "APP_b"}

# Calling RAUC itself would call its backend, again and again.
_THERE = (
    "dbus-send --session --print-reply --dest=org.freedesktop.DBus / "
    "org.freedesktop.DBus.GetNameOwner string:de.pengutronix.rauc"
)


class Board:
    """A board that was flashed with `image` in both slots and runs A.

    Args:
        folder: empty.
        image: an ext4 image.
        keyring: certificates whose bundles it takes.
    """

    def __init__(self, folder: Path, image: Path, keyring: Path) -> None:
        self.folder = folder
        self.firmware = Firmware.flashed(folder / "root")
        self.state = folder / "data"
        self.state.mkdir()
        (self.state / "update").mkdir()
        for slot in PARTITIONS:
            shutil.copy(image, self.slot(slot))
        self._bin = programs(folder)
        # Only the board's verbs of slots take --root.
        command = shlex.join([sys.executable, "-m", "edge_server"])
        places = shlex.join(
            ["--root", str(self.firmware.root), "--state-directory", f"{self.state}"]
        )
        (self._bin / "edge-server").write_text(f'#!/bin/sh\nexec {command} "$@" {places}\n')
        (self._bin / "edge-server").chmod(0o755)
        self._config = folder / "system.conf"
        config = (UPDATE / "system.conf").read_text()
        for installed, here in (
            ("@COMPATIBLE@", COMPATIBLE),
            ("/run/rauc", f"{folder}/mounts"),
            ("/etc/rauc/keyring.pem", str(keyring)),
            ("/usr/lib/edge-server-update/rauc-backend", str(UPDATE / "rauc-backend")),
            ("/var/lib/edge_server", str(self.state)),
            ("/dev/disk/by-partlabel", str(self.slot("A").parent)),
        ):
            assert installed in config
            config = config.replace(installed, here)
        self._config.write_text(config)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self._bin}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "EDGE_SIMULATED_JETSON": str(self.firmware.root),
        }

    @property
    def record(self) -> UpdateRecord:
        return RecordFile(self.state).read()

    def slot(self, slot: str) -> Path:
        return self.firmware.root / "dev/disk/by-partlabel" / PARTITIONS[slot]

    def digest(self, slot: str) -> str:
        return hashlib.sha256(self.slot(slot).read_bytes()).hexdigest()

    def file(self, slot: str, path: str) -> str:
        """The text of a file in a slot's file system; empty if it has none."""
        command = ["debugfs", "-R", f"cat {path}", str(self.slot(slot))]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=self.environment
        ).stdout

    def is_whole(self, slot: str) -> bool:
        """Whether the slot's file system is one that boots: undamaged, and it knows its root."""
        command = ["e2fsck", "-fn", str(self.slot(slot))]
        check = subprocess.run(command, capture_output=True, check=False, env=self.environment)
        return check.returncode == 0

    def rauc(self, *arguments: str, booted: str = "A") -> subprocess.CompletedProcess[str]:
        """Run RAUC's client against a service of its own."""
        with self.session(*arguments, booted=booted) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                cut_power(process)
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def session(
        self, *arguments: str, booted: str = "A", strace: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """Start service and client in a process group of their own."""
        rauc = shlex.join(["rauc", "--conf", str(self._config)])
        client = shlex.join(arguments)
        script = (
            # There is no system bus in a container; dbus-run-session clears the variable.
            "export DBUS_STARTER_BUS_TYPE=session; "
            f"{shlex.join(strace)} {rauc} --override-boot-slot={booted} service & service=$!; "
            f"for _ in $(seq 200); do {_THERE} >/dev/null 2>&1 && break; sleep 0.05; done; "
            f"{rauc} {client}; code=$?; kill $service; wait $service; exit $code"
        )
        return subprocess.Popen(
            ["dbus-run-session", "--", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def unmount(self) -> None:
        """What a killed RAUC leaves mounted, a reboot takes away."""
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            place = line.split()[1]
            if place.startswith(str(self.folder)):
                subprocess.run(["umount", "--lazy", place], check=False)


def programs(folder: Path) -> Path:
    """The folder of the stand-ins, for PATH; they run with the Python of the tests."""
    place = folder / "bin"
    if not place.exists():
        place.mkdir()
        (place / "blkid").symlink_to(HERE / "blkid")
        command = shlex.join([sys.executable, "-S", str(HERE / "nvbootctrl")])
        (place / "nvbootctrl").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (place / "nvbootctrl").chmod(0o755)
    return place


def cut_power(process: subprocess.Popen[str]) -> None:
    """End every process of the session at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key; both for tests only."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "60"]
    files = ["-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return certificate, key


def make_image(folder: Path, name: str, size_bytes: int = 8 * 1024 * 1024) -> Path:
    """An ext4 image as a build makes it, whose kernel line names a partition of that machine."""
    tree = folder / f"{name}.tree"
    (tree / "boot/extlinux").mkdir(parents=True)
    (tree / "boot/extlinux/extlinux.conf").write_text(
        "TIMEOUT 30\nDEFAULT primary\n\nLABEL primary\n      LINUX /boot/Image\n"
        "      INITRD /boot/initrd\n"
        "      APPEND ${cbootargs} root=PARTUUID=build-machine rw rootwait\n"
    )
    (tree / "version").write_text(name)
    (tree / "content").write_bytes(os.urandom(size_bytes // 4))
    image = folder / f"{name}.ext4"
    command = ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(image), f"{size_bytes // 1024}k"]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return image


def make_bundle(
    folder: Path,
    image: Path,
    keys: tuple[Path, Path],
    *,
    version: str = "2.0",
    compatible: str = COMPATIBLE,
    form: str = "plain",
) -> Path:
    """Run `build_bundle` as a release does."""
    certificate, key = keys
    out = folder / f"{version}-{compatible}-{form}-{certificate.stem}.raucb"
    command = [UPDATE / "build_bundle", "--rootfs", image, "--compatible", compatible]
    command += ["--version", version, "--cert", certificate, "--key", key]
    command += ["--keyring", certificate, "--format", form, out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out
