"""What a disk or a network file system does to a daemon that serves: it goes on, and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.adding_models import build, network, swap
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.polling_server import Server

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    build(place / "m", network(1))
    build(place / "other", network(100))
    return place


def test_what_serves_goes_on_while_the_state_directory_is_read_only(
    serve: Callable[..., Server],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid():
        pytest.skip("a mount namespace needs root")
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    within = ("unshare", "--mount", "--propagation=private")
    server = serve(f"--repository-copies={state / 'store'}", within=within)

    def mount(command: str) -> None:
        enter = ["nsenter", "--mount", f"--target={server.process.popen.pid}"]
        subprocess.run([*enter, "sh", "-ec", command, str(state)], check=True)

    wait_until(lambda: "model m: last known good" in server.log, otherwise=lambda: server.log)
    mount('mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"')
    swap(repository, "m", network(2))
    assert server.wait_for_reason("Read-only file system") == "READY"
    assert server.answer() == 1
    mount('umount "$0"')
    assert server.wait_for(2) <= {1}
    wait_until(lambda: server.index()["m"] == [("READY", "")], otherwise=lambda: server.log)
    assert server.process.terminate() == 0


# A file system of the daemon's own, which the kernel makes read-only at its first error.
EXT4 = 'mount -o loop,errors=remount-ro "$0" "$1"; shift; exec "$@"'
ERROR = 'echo 1 >"/sys/fs/ext4/$(basename "$(findmnt -no SOURCE "$0")")/trigger_fs_error"'


@pytest.mark.long
def test_a_disk_that_the_kernel_makes_read_only_costs_what_is_written_alone(
    serve: Callable[..., Server],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike with a mount over it, files that are open can no longer be written either."""
    if os.geteuid() or shutil.which("mkfs.ext4") is None:
        pytest.skip("a disk of a file needs root and e2fsprogs")
    state, image = tmp_path / "state", tmp_path / "image"
    state.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    alone = ("unshare", "--mount", "--propagation=private", "sh", "-ec")
    tried = subprocess.run(
        [*alone, EXT4, image, state, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no disk can be made of a file here: {tried.stderr.strip()}")
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    config = tmp_path / "config.toml"
    config.write_text(
        f'[trace]\nfile = "{state}/trace.json"\nlevel = ["TIMESTAMPS"]\nrate = 1\n'
        '[recorder]\nmode = "continuous"\n[cameras.front]\nmodel = "lane_detection"\n'
        'uri = "synthetic://road?seed=7&fps=5"\n'
    )
    server = serve(
        f"--config={config}",
        f"--model-repository={MODELS}",
        f"--repository-copies={state / 'store'}",
        within=(*alone, EXT4, str(image), str(state)),
    )
    wait_until(lambda: "model m: last known good" in server.log, otherwise=lambda: server.log)
    inside = ["nsenter", "--mount", f"--target={server.process.popen.pid}", "sh", "-ec"]
    subprocess.run([*inside, ERROR, state], check=True)
    swap(repository, "m", network(2))
    assert server.wait_for_reason("Read-only file system") == "READY"
    assert server.answer() == 1
    for said in (
        "recorder: nothing is recorded: the disk: Read-only file system; lanes go on",
        "traces are lost: Read-only file system",
    ):
        wait_until(lambda said=said: said in server.log, otherwise=lambda: server.log)
    before = server.metric('edge_frames_total{camera="front"}')
    wait_until(lambda: server.metric('edge_frames_total{camera="front"}') > before + 5)
    assert server.process.terminate() == 0


def test_what_served_last_serves_after_a_restart_on_a_read_only_disk(
    serve: Callable[..., Server],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid():
        pytest.skip("a mount namespace needs root")
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    copies = f"--repository-copies={state / 'store'}"
    server = serve(copies)
    wait_until(lambda: "model m: last known good" in server.log, otherwise=lambda: server.log)
    assert server.process.terminate() == 0
    read_only = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec "$@"'
    within = ("unshare", "--mount", "--propagation=private", "sh", "-ec", read_only, str(state))
    server = serve(copies, within=within)
    assert server.answer() == 1
    assert server.process.terminate() == 0


def test_what_a_network_file_system_leaves_and_the_clock_of_its_server_are_no_change(
    serve: Callable[..., Server], repository: Path
) -> None:
    """A file that is removed while it is open stays as `.nfs…`; times are those of the server."""
    years_ns = 10**9 * 3600 * 24 * 3650
    now_ns = (repository / "m" / "config.pbtxt").stat().st_mtime_ns
    os.utime(repository / "m" / "1" / "model.onnx", ns=(0, now_ns + years_ns))
    server = serve()
    assert server.answer() == 1
    loaded = server.metric('edge_model_reload_total{result="loaded"}')
    for folder in (repository, repository / "m", repository / "m" / "1"):
        (folder / ".nfs000000000000a1b200000001").write_bytes(b"open")
    # The next change is loaded, and it is the only one, though it is older than what serves.
    older = repository.parent / "older.onnx"
    older.write_bytes(network(2))
    os.utime(older, ns=(0, now_ns - years_ns))
    older.replace(repository / "m" / "1" / "model.onnx")
    assert server.wait_for(2) <= {1}
    name = 'edge_model_reload_total{result="loaded"}'
    wait_until(lambda: server.metric(name) == loaded + 1, otherwise=lambda: server.log)
    assert server.metric('edge_model_reload_total{result="failed"}') == 0
    assert server.index().keys() == {"m", "other"}
