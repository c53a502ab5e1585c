"""Wherever the power fails while a system is updated, something boots that serves.

    EDGE_CRASH_POINTS=all pytest tests/integration/test_update_power_cut.py

cuts at every call that changes a file or a variable of the firmware, not at some. The board is
simulated: `tests/support/simulated_jetson` has the rules of its firmware.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.simulated_jetson.board import (
    Board,
    cut_power,
    make_bundle,
    make_image,
    make_keys,
    programs,
)
from support.simulated_jetson.firmware import TRIES, Firmware

from edge_server.board.update import BootSlots, RecordFile
from edge_server.cli.update import UpdatedDevice
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POINTS = os.environ.get("EDGE_CRASH_POINTS", "")
# In an ordinary run of the tests: one cut of so many.
EACH = 1 if POINTS == "all" else 6
CHANGES = "write|pwrite64|fsync|fdatasync|rename.*|mkdir.*|unlink.*|ftruncate|openat"
WRITER = Path(__file__).parents[1] / "support" / "update_writer.py"
VERSIONS = {"A": "1.0", "B": "2.0"}


class Call(NamedTuple):
    """The `count`-th call of that name on `path`, in one of the processes."""

    name: str
    count: int
    path: str


class Machine:
    """A flashed board and its data partition in a folder, that steps of an update run on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root, self.state = folder / "root", folder / "data"
        self.firmware = Firmware(self.root)

    def copy(self, folder: Path) -> Machine:
        shutil.copytree(self.folder, folder, symlinks=True)
        return Machine(folder)

    def command(self, step: str, boot: str) -> list[str]:
        return [sys.executable, str(WRITER), str(self.root), str(self.state), boot, step]

    @property
    def environment(self) -> dict[str, str]:
        path = f"{programs(self.folder.parent)}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "EDGE_SIMULATED_JETSON": str(self.root)}

    def run(self, step: str, boot: str) -> None:
        command = self.command(step, boot)
        subprocess.run(command, check=True, env=self.environment, capture_output=True)

    def trace(self, step: str, boot: str) -> list[Call]:
        """Run a step; the calls that changed something here, in their order."""
        log = self.folder / "trace"
        strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-s", "4096", "-o", str(log)]
        strace += ["-e", f"trace=/^({CHANGES})$"]
        command = [*strace, *self.command(step, boot)]
        subprocess.run(command, check=True, env=self.environment, capture_output=True)
        counts: Counter[tuple[str, str, str]] = Counter()
        calls = []
        for process, name, text in re.findall(r"(?m)^(\d+) +(\w+)(\(.*)", log.read_text()):
            if name == "openat" and "O_CREAT" not in text:
                continue
            found = re.search(
                rf'[<"]({re.escape(str(self.folder))}/(?:root|data)[^<>"]*)[>"]', text
            )
            if found is None or " = -1 " in text:
                continue
            path = found[1]
            counts[process, name, path] += 1
            calls.append(Call(name, counts[process, name, path], path))
        log.unlink()
        return calls

    def cut(self, step: str, boot: str, after: Call) -> None:
        """Run a step, and cut the power after that call: every process stands still, then dies."""
        inject = f"inject={after.name}:signal=SIGSTOP:when={after.count}"
        strace = [
            "strace",
            "-f",
            "-qq",
            "-P",
            after.path,
            "-e",
            f"trace={after.name}",
            "-e",
            inject,
        ]
        with subprocess.Popen(
            [*strace, *self.command(step, boot)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=self.environment,
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if "stopped by SIGSTOP" in line:
                    cut_power(process)
                    return
        raise AssertionError(f"nothing was cut at {after}:\n{said}")

    def serves(self, unhealthy: str = "") -> str:
        """Switch the power on until a healthy system was kept; its slot.

        Args:
            unhealthy: the slot whose system never becomes healthy.
        """
        self.firmware.cut_power()
        for boot in range(2 * TRIES):
            slot = self.firmware.boot()
            assert slot is not None, "no slot boots: the board needs a USB cable"
            slots = BootSlots(self.root, self.firmware.nvbootctrl)
            record = RecordFile(self.state)
            device = UpdatedDevice(slots, record, f"later-{boot}", VERSIONS[slot])
            try:
                device.commit(lambda slot=slot: "bad" if slot == unhealthy else "")
            except Unavailable:
                continue
            assert record.read().state != "pending"
            assert self.firmware.tries(slot) == TRIES
            return slot
        raise AssertionError("no healthy system was found")


@pytest.fixture
def flashed(in_memory: Callable[[], Path]) -> Machine:
    folder = in_memory() / "flashed"
    Firmware.flashed(folder / "root")
    (folder / "data").mkdir()
    return Machine(folder)


@pytest.fixture
def on_trial(flashed: Machine) -> Machine:
    flashed.run("switch", "1")
    assert flashed.firmware.boot() == "B"
    return flashed


def cuts(device: Machine, step: str, boot: str) -> Iterator[tuple[Call, Machine]]:
    """Each point of the step, with a board that lost its power there."""
    # In the same place each time, so that a traced path is the one that is cut at.
    before = device.copy(device.folder.with_name("before"))
    calls = device.trace(step, boot)
    assert len(calls) > 5
    kept = calls[(len(calls) - 1) % EACH :: EACH]  # the last one always
    for call in kept:
        shutil.rmtree(device.folder)
        before.copy(device.folder)
        device.cut(step, boot, call)
        yield call, device


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("unhealthy", ["", "B"])
def test_a_power_cut_while_the_slot_is_switched(flashed: Machine, unhealthy: str) -> None:
    served = [device.serves(unhealthy) for _, device in cuts(flashed, "switch", "1")]
    # The old system up to one of the calls; the new one, where it is healthy, from there on.
    assert served == sorted(served)
    assert served[0] == "A"
    assert (served[-1] == "B") == (not unhealthy)


@pytest.mark.usefixtures("strace")
def test_a_power_cut_while_a_healthy_system_is_committed(on_trial: Machine) -> None:
    for call, device in cuts(on_trial, "healthy", "2"):
        assert device.serves() == "B", call


@pytest.mark.usefixtures("strace")
def test_a_power_cut_while_an_unhealthy_system_is_left(on_trial: Machine) -> None:
    for call, device in cuts(on_trial, "unhealthy", "2"):
        assert device.serves("B") == "A", call


@pytest.mark.usefixtures("strace")
def test_a_power_cut_while_the_old_system_concludes_that_it_was_rolled_back(
    on_trial: Machine,
) -> None:
    on_trial.run("unhealthy", "2")
    assert on_trial.firmware.boot() == "A"
    for call, device in cuts(on_trial, "healthy", "3"):
        assert device.serves("B") == "A", call
        assert RecordFile(device.state).read().state == "rolled_back"


@pytest.mark.usefixtures("strace")
def test_that_a_system_is_on_trial_is_on_the_disk_before_it_can_boot(flashed: Machine) -> None:
    calls = flashed.trace("switch", "1")
    names = [(call.name, Path(call.path).name) for call in calls]
    record = names.index(("fsync", "update"))
    assert any(name.startswith("rename") for name, _ in names[:record])
    assert record < min(i for i, (_, path) in enumerate(names) if path.startswith("Rootfs"))


CUT_AT = """#!/bin/sh
# Counts what RAUC, its backend and the hook call; the power fails before number $EDGE_CUT_AT.
echo x >>"$EDGE_CUT_COUNT"
[ "$(wc -l <"$EDGE_CUT_COUNT")" = "$EDGE_CUT_AT" ] && kill -KILL 0
exec {program} "$@"
"""


class CuttableBoard(Board):
    """A board whose power fails when RAUC, its backend or the hook call the n-th program."""

    def cut_before(self, number: int) -> None:
        self._count = self.folder / "count"
        self._count.write_text("")
        self._at = number
        for name in ("edge-server", "nvbootctrl", "blkid", "sed", "grep", "sync", "mv"):
            here, real = self._bin / name, self._bin / f"real-{name}"
            if here.exists() and not real.exists():
                here.rename(real)
            program = real if real.exists() or real.is_symlink() else shutil.which(name)
            here.write_text(CUT_AT.format(program=program))
            here.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        more = {"EDGE_CUT_AT": str(self._at), "EDGE_CUT_COUNT": str(self._count)}
        return {**super().environment, **more}

    @property
    def called(self) -> int:
        return len(self._count.read_text().splitlines())


class Release(NamedTuple):
    key: Path
    old: Path
    bundle: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    if not (shutil.which("rauc") and shutil.which("dbus-run-session")):
        pytest.skip("apt install rauc dbus squashfs-tools e2fsprogs")
    folder = tmp_path_factory.mktemp("release")
    keys = make_keys(folder, "release")
    new = make_image(folder, "2.0")
    return Release(keys[0], make_image(folder, "1.0"), make_bundle(folder, new, keys))


def install_and_cut(folder: Path, release: Release, at: int) -> tuple[CuttableBoard, int]:
    board = CuttableBoard(folder, release.old, release.key)
    board.cut_before(at)
    done = board.rauc("install", str(release.bundle))
    board.unmount()
    return board, done.returncode


def require_serving(board: Board) -> str:
    """What boots is whole: the old system as it was, or all of the new one."""
    board.firmware.cut_power()
    slot = board.firmware.boot()
    assert slot is not None
    assert board.is_whole(slot)
    assert board.file(slot, "/version") == VERSIONS[slot]
    if slot == "B":
        kernel = board.file(slot, "/boot/extlinux/extlinux.conf")
        assert "root=PARTUUID=0000000b-02 rauc.slot=B" in kernel
    slots = BootSlots(board.firmware.root, board.firmware.nvbootctrl)
    UpdatedDevice(slots, RecordFile(board.state), "later", VERSIONS[slot]).commit(lambda: "")
    assert board.firmware.boot() == slot
    return slot


def test_a_power_cut_while_rauc_installs(tmp_path: Path, release: Release) -> None:
    board, code = install_and_cut(tmp_path / "whole", release, 0)
    assert code == 0
    assert require_serving(board) == "B"
    number = board.called
    assert number > 10
    points = range(1, number + 1) if EACH == 1 else (number // 2, number)
    served = []
    for at in points:
        board, code = install_and_cut(tmp_path / str(at), release, at)
        assert board.called == at, "the power did not fail"
        served.append(require_serving(board))
        if served[-1] == "A" and at == number // 2:
            board.cut_before(0)
            assert board.rauc("install", str(release.bundle)).returncode == 0
            board.unmount()
            assert require_serving(board) == "B"
        shutil.rmtree(board.folder)
    assert served == sorted(served)
    assert served[0] == "A"


@pytest.mark.long
@pytest.mark.usefixtures("strace")
def test_a_power_cut_while_the_image_is_written(tmp_path: Path, release: Release) -> None:
    board = Board(tmp_path / "device", release.old, release.key)
    target = str(board.slot("B"))
    for at in (1, 100):
        inject = f"inject=write:signal=SIGSTOP:when={at}"
        strace = ("strace", "-f", "-qq", "-P", target, "-e", "trace=write", "-e", inject)
        process = board.session("install", str(release.bundle), strace=strace)
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "stopped by SIGSTOP" in line:
                break
        else:
            raise AssertionError(f"the image was not written:\n{said}")
        cut_power(process)
        board.unmount()
        assert require_serving(board) == "A"
        assert board.firmware.nvbootctrl(["dump-slots-info"]).count("unbootable") == 1
    assert board.rauc("install", str(release.bundle)).returncode == 0
    board.unmount()
    assert require_serving(board) == "B"
