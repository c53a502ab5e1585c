"""What `jetpack/update/install` puts into an image, and the reboot of a system not kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.simulated_jetson.board import make_keys, programs
from support.simulated_jetson.firmware import Firmware

from edge_server.board.update import BootSlots, RecordFile, UpdateRecord
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

UPDATE = Path(__file__).parents[2] / "jetpack" / "update"


def files(root: Path) -> dict[str, tuple[int, bytes | str]]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            str(path.readlink()) if path.is_symlink() else path.read_bytes(),
        )
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_the_files_are_put_into_an_image_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    certificate, _ = make_keys(tmp_path, "release")
    root = tmp_path / "rootfs"
    (root / "etc").mkdir(parents=True)
    command = [UPDATE / "install", root, "--compatible", "edge-server-orin-nano"]
    command += ["--keyring", certificate]
    subprocess.run(command, check=True)
    first = files(root)
    subprocess.run(command, check=True)
    assert files(root) == first
    assert "compatible=edge-server-orin-nano\n" in (root / "etc/rauc/system.conf").read_text()
    # NVIDIA's own service would keep every system, healthy or not.
    verifier = root / "etc/systemd/system/nv_update_verifier.service"
    assert str(verifier.readlink()) == "/dev/null"
    assert os.access(root / "usr/lib/edge-server-update/rauc-backend", os.X_OK)
    assert os.access(root / "usr/share/mender/modules/v3/edge-server-deb", os.X_OK)


@pytest.mark.parametrize("arguments", [[], ["/nowhere", "--compatible", "a"], ["/", "-x", "a"]])
def test_wrong_arguments_are_usage(arguments: list[str]) -> None:
    done = subprocess.run([UPDATE / "install", *arguments], capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="apt install shellcheck")
def test_the_scripts_are_clean() -> None:
    scripts = [path for path in UPDATE.rglob("*") if path.is_file() and os.access(path, os.X_OK)]
    assert len(scripts) > 5
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.fixture
def rollback(tmp_path: Path) -> Callable[[UpdateRecord | None], bool]:
    """Runs the script on a simulated board that runs A; whether it rebooted."""
    Firmware.flashed(tmp_path / "board")
    place = programs(tmp_path)
    (place / "systemctl").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/rebooted\n')
    (place / "systemctl").chmod(0o755)

    def run(record: UpdateRecord | None) -> bool:
        (tmp_path / "rebooted").unlink(missing_ok=True)
        if record is not None:
            RecordFile(tmp_path).write(record)
        environment = {
            **os.environ,
            "PATH": f"{place}:{os.environ['PATH']}",
            "STATE_DIRECTORY": str(tmp_path),
            "EDGE_SIMULATED_JETSON": str(tmp_path / "board"),
        }
        subprocess.run(
            [UPDATE / "guard", "rollback"], check=True, env=environment, capture_output=True
        )
        return (tmp_path / "rebooted").exists()

    return run


def test_only_a_system_on_trial_is_rebooted(
    rollback: Callable[[UpdateRecord | None], bool],
) -> None:
    assert not rollback(None)
    assert not rollback(UpdateRecord("committed", "A", "B"))
    assert not rollback(UpdateRecord("pending", "B", "A"))  # the old one, with the switch ahead
    assert rollback(UpdateRecord("pending", "A", "B", result='"state":"none"'))


def test_a_new_system_that_cannot_read_the_record_is_on_trial(
    rollback: Callable[[UpdateRecord | None], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_TRIAL_MARK", str(tmp_path / "mark"))
    assert not rollback(None)
    (tmp_path / "mark").touch()
    assert rollback(None)
    assert not rollback(UpdateRecord("committed", "A", "B"))


def test_a_broken_tool_of_nvidia_does_not_keep_a_system_on_trial(
    rollback: Callable[[UpdateRecord | None], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bin/nvbootctrl").write_text("#!/bin/sh\necho Segmentation fault\n")
    (tmp_path / "cmdline").write_text("root=PARTUUID=1 rw rauc.slot=B quiet\n")
    monkeypatch.setenv("EDGE_CMDLINE", str(tmp_path / "cmdline"))
    assert not rollback(UpdateRecord("pending", "A", "B"))
    assert rollback(UpdateRecord("pending", "B", "A"))


def test_what_nvbootctrl_prints_need_not_be_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvbootctrl").write_text("#!/bin/sh\nprintf '\\377\\376'\n")
    (tmp_path / "nvbootctrl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Unavailable, match="is no slot"):
        BootSlots(tmp_path).current()


@pytest.mark.parametrize(
    ("text", "kernel_lines"),
    [
        ("LABEL a\n\tLINUX /I\n\tAPPEND\troot=/dev/x\trw\n", ["\tAPPEND\trw"]),
        ("LABEL a\r\n LINUX /I\r\n APPEND quiet\r\n", [" APPEND quiet"]),
        ("LABEL a\n LINUX /I\n APPEND\n", [" APPEND"]),
        (
            "#  APPEND x\nLABEL a\nLINUX /I\nAPPEND x rauc.slot=A\nLABEL b\nLINUX /J\nAPPEND y\n",
            ["APPEND x", "APPEND y"],
        ),
        ("LABEL a\nLINUX /I\nAPPEND x\nLABEL b\nLINUX /J\n", None),
        ("LABEL a\nLINUX /I\nappend root=/dev/x\n", None),
        ("", None),
        (None, None),
    ],
)
def test_every_kernel_gets_the_root_of_its_slot_or_the_update_is_refused(
    tmp_path: Path, text: str | None, kernel_lines: list[str] | None
) -> None:
    extlinux = tmp_path / "boot/extlinux/extlinux.conf"
    extlinux.parent.mkdir(parents=True)
    if text is not None:
        extlinux.write_bytes(text.encode())
    (tmp_path / "blkid").write_text("#!/bin/sh\necho 17\n")
    (tmp_path / "blkid").chmod(0o755)
    slot = {"RAUC_SLOT_MOUNT_POINT": str(tmp_path), "RAUC_SLOT_DEVICE": "x"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAUC_SLOT_BOOTNAME": "B"}
    command = [UPDATE / "hook", "slot-post-install"]
    done = subprocess.run(
        command, env={**os.environ, **slot, **path}, capture_output=True, text=True, check=False
    )
    if kernel_lines is None:
        assert done.returncode == 1
        assert "extlinux.conf: " in done.stderr
        assert text is None or extlinux.read_bytes() == text.encode()
        return
    assert done.returncode == 0, done.stderr
    after = [line for line in extlinux.read_text().splitlines() if line.strip().startswith("APP")]
    assert after == [f"{line} root=PARTUUID=17 rauc.slot=B" for line in kernel_lines]
