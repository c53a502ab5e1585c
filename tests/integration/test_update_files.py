"""What `jetpack/update/install` puts into an image, and the reboot of a system not kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from simulated_jetson.board import make_keys, programs
from simulated_jetson.firmware import Firmware

from edge_server.board.update_record import RecordFile, UpdateRecord

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
        subprocess.run([UPDATE / "rollback"], check=True, env=environment, capture_output=True)
        return (tmp_path / "rebooted").exists()

    return run


def test_only_a_system_on_trial_is_rebooted(
    rollback: Callable[[UpdateRecord | None], bool],
) -> None:
    assert not rollback(None)
    assert not rollback(UpdateRecord("committed", "A", "B"))
    assert not rollback(UpdateRecord("pending", "B", "A"))  # the old one, with the switch ahead
    assert rollback(UpdateRecord("pending", "A", "B", result='"state":"none"'))


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
