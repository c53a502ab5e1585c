"""A board is known by its files; what they do not tell is None and never an exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.board.board import JETPACKS, L4tRelease, jetpack_of, read_board
from edge_server.board.facts import PowerMode, read_power_modes
from edge_server.board.resources import GroupLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.fake_board import FakeBoard

NOW_S = 4e9


@pytest.mark.parametrize(
    ("module", "l4t", "told"),
    [
        ("p3767-0001", "36.4.3", ("Jetson Orin NX 8GB", 1, "6.2")),
        ("p3767-0005", "36.4.7", ("Jetson Orin Nano 8GB (developer kit)", 0, "6.2.1")),
        ("p3701-0005", "39.2.0", ("Jetson AGX Orin 64GB", 2, "7.2")),
        ("p3701-0004", "36.3", ("Jetson AGX Orin 32GB", 2, "6.0")),
    ],
)
def test_module_and_jetpack_are_told_by_device_tree_and_release(
    fake_board: FakeBoard, module: str, l4t: str, told: tuple[str, int, str]
) -> None:
    fake_board.jetson("NVIDIA Jetson", module, l4t)
    board = read_board(fake_board.root, NOW_S)
    assert board.module is not None
    assert board.jetpack is not None
    assert (board.module.name, board.module.nvdla_cores, board.jetpack.version) == told
    assert (board.chip, board.is_jetson) == ("Orin", True)


def test_a_jetson_tells_all_of_itself(fake_board: FakeBoard) -> None:
    fake_board.jetson("NVIDIA Jetson Orin NX Engineering Reference", "p3767-0000", "36.4.3")
    fake_board.node("video0", label="vi-output, imx219 9-0010")
    fake_board.node("video1", label="HD Webcam")
    fake_board.write("tmp/argus_socket", "")
    board = read_board(fake_board.root, NOW_S)
    assert board.model == "NVIDIA Jetson Orin NX Engineering Reference"
    assert str(board.l4t) == "36.4.3"
    assert board.kernel == "5.15.148-tegra"
    assert board.cuda == "12.6.10"
    assert board.facts is not None
    assert board.facts.memory.total_bytes == 15656432 * 1024
    assert [camera.is_csi for camera in board.cameras] == [True, False]
    assert board.argus
    assert board.systemd
    assert board.wall_clock.synchronized
    assert board.unit is not None
    assert (board.unit.user, board.account.name) == ("edge-server", "edge-server")


def test_rights_are_those_of_the_units_user_by_group_and_mode(fake_board: FakeBoard) -> None:
    fake_board.jetson("NVIDIA Jetson", "p3767-0000", "36.4.3")
    nodes = {node.path: node for node in read_board(fake_board.root, NOW_S).gpu_nodes}
    assert nodes["/dev/nvmap"].usable
    assert not nodes["/dev/nvmap"].for_root
    assert nodes["/dev/nvgpu/igpu0/channel"].usable
    assert not nodes["/dev/nvhost-power-gpu"].usable
    assert nodes["/dev/nvhost-power-gpu"].group is None
    assert nodes["/dev/nvhost-power-gpu"].for_root

    fake_board.node("nvmap", 0o440)  # to read only, and that the account may
    nodes = {node.path: node for node in read_board(fake_board.root, NOW_S).gpu_nodes}
    assert not nodes["/dev/nvmap"].usable
    assert nodes["/dev/nvmap"].group is None
    assert not nodes["/dev/nvmap"].for_root

    fake_board.node("nvmap")
    fake_board.write("etc/group", f"video:x:{fake_board.video}:somebody\n")
    nodes = {node.path: node for node in read_board(fake_board.root, NOW_S).gpu_nodes}
    assert not nodes["/dev/nvmap"].usable
    assert nodes["/dev/nvmap"].group == "video"


def test_a_desktop_and_an_empty_root_are_normal(fake_board: FakeBoard, tmp_path: Path) -> None:
    fake_board.node("dri/renderD128")  # of another maker's GPU
    for root in (fake_board.root, tmp_path / "nowhere"):
        board = read_board(root, NOW_S)
        assert not board.is_jetson
        assert board.gpu_nodes == board.cameras == ()
        assert board.l4t is board.module is board.unit is None
        assert board.limits == GroupLimits(None, None)


def test_files_that_nobody_can_read_are_as_if_they_were_not_there(
    fake_board: FakeBoard, unreadable: Callable[[Path], None]
) -> None:
    for name in (
        "etc/nv_tegra_release",
        "etc/nvpmodel.conf",
        "etc/systemd/system/edge-server.service",
        "proc/device-tree/model",
        "proc/device-tree/compatible",
        "proc/meminfo",
        "proc/self/cgroup",
        "run/systemd/system",
        "run/systemd/timesync/synchronized",
        "sys/class/thermal/thermal_zone0/temp",
        "tmp/argus_socket",
        "dev/video0",
        "dev/nvmap",
        "usr/lib/clock-epoch",
        "usr/local/cuda/version.json",
    ):
        unreadable(fake_board.root / name)
    board = read_board(fake_board.root, NOW_S)
    assert not board.is_jetson
    assert not board.systemd
    assert [camera.usable for camera in board.cameras] == [False]


@given(st.binary(max_size=200))
def test_no_content_of_a_file_is_an_exception(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    root = tmp_path_factory.mktemp("junk")
    for name in (
        "etc/nv_tegra_release",
        "etc/nvpmodel.conf",
        "etc/passwd",
        "etc/group",
        "etc/systemd/system/edge-server.service",
        "var/lib/nvpmodel/status",
        "proc/device-tree/compatible",
        "proc/meminfo",
        "proc/self/cgroup",
        "sys/class/thermal/thermal_zone0/temp",
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/cpu.max",
        "usr/local/cuda/version.json",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(junk)
    read_board(root, NOW_S)


@pytest.mark.parametrize(
    ("names", "highest"),
    [
        (("MAXN", "15W", "30W", "50W"), PowerMode(0, "MAXN")),
        (("15W", "25W", "MAXN_SUPER", "7W"), PowerMode(2, "MAXN_SUPER")),
        (("MAXN", "MAXN_SUPER"), PowerMode(1, "MAXN_SUPER")),
        (("15W", "7W"), PowerMode(0, "15W")),
        (("10W", "QUIET"), PowerMode(0, "10W")),
    ],
)
def test_the_highest_power_mode_is_found_by_its_name(
    fake_board: FakeBoard, names: tuple[str, ...], highest: PowerMode
) -> None:
    fake_board.power_modes(*names, current=1)
    modes = read_power_modes(fake_board.root)
    assert modes is not None
    assert modes.highest == highest
    assert modes.current == PowerMode(1, names[1])


def test_a_power_mode_that_nobody_chose_is_the_default(fake_board: FakeBoard) -> None:
    fake_board.power_modes("15W", "7W", current=None)
    modes = read_power_modes(fake_board.root)
    assert modes is not None
    assert modes.current == PowerMode(0, "15W")


def test_the_tightest_cgroup_around_counts(fake_board: FakeBoard) -> None:
    fake_board.write("proc/self/cgroup", "0::/system.slice/edge-server.service\n")
    fake_board.write("sys/fs/cgroup/system.slice/edge-server.service/memory.max", "max\n")
    fake_board.write("sys/fs/cgroup/system.slice/memory.max", "4294967296\n")
    fake_board.write("sys/fs/cgroup/system.slice/edge-server.service/cpu.max", "150000 100000\n")
    fake_board.write("sys/fs/cgroup/cpu.max", "max 100000\n")
    assert read_board(fake_board.root, NOW_S).limits == GroupLimits(4 << 30, 1.5)


def test_a_clock_before_the_release_was_built_is_behind(fake_board: FakeBoard) -> None:
    fake_board.write("etc/nv_tegra_release", "")
    assert read_board(fake_board.root, 0.0).wall_clock.is_behind
    assert not read_board(fake_board.root, NOW_S).wall_clock.is_behind


@given(st.integers(35, 40), st.integers(0, 9), st.integers(0, 9))
def test_a_release_belongs_to_the_last_jetpack_before_it_of_its_major(
    major: int, minor: int, patch: int
) -> None:
    release = L4tRelease(major, minor, patch)
    jetpack = jetpack_of(release)
    older = [each for each in JETPACKS if each.since.major == major and each.since <= release]
    if jetpack is None:
        assert not older
    else:
        assert jetpack.since == max(each.since for each in older)


@given(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_release_is_read_as_it_is_written(major: int, minor: int, patch: int) -> None:
    line = f"# R{major} (release), REVISION: {minor}.{patch}, GCID: 1, BOARD: generic"
    assert L4tRelease.parse(line) == L4tRelease(major, minor, patch)
