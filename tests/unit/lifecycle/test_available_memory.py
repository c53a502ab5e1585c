"""The least of what the board has and what every limit above the process leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.lifecycle.build import available_bytes

if TYPE_CHECKING:
    from pathlib import Path

BOARD = 1000 * 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 1000 kB\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def group(root: Path, path: str, **files: object) -> None:
    """A control group; `memory_max` is its file memory.max."""
    for name, text in files.items():
        write(root, f"sys/fs/cgroup/{path}/{name.replace('_', '.', 1)}", f"{text}\n")


def test_without_control_groups_the_board_counts(root: Path) -> None:
    assert available_bytes(root) == BOARD
    write(root, "proc/self/cgroup", "0::/a\n")
    assert available_bytes(root) == BOARD


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"memory_max": "max", "memory_high": "max"}, BOARD),
        ({"memory_max": 5000}, 4000),
        ({"memory_max": 5000, "memory_high": 3000}, 2000),
        ({"memory_max": 5000, "memory_high": "max"}, 4000),
        ({"memory_max": 500}, 0),
        ({"memory_max": 10**12}, BOARD),
        ({"memory_max": "nonsense"}, BOARD),
    ],
)
def test_a_unit_may_use_what_its_limits_leave(
    root: Path, limits: dict[str, object], left: int
) -> None:
    write(root, "proc/self/cgroup", "0::/system.slice/edge-server.service\n")
    group(root, "system.slice/edge-server.service", memory_current=1000, **limits)
    assert available_bytes(root) == left


def test_files_that_were_read_once_are_no_use_of_memory(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/unit\n")
    stat = "anon 400\ninactive_file 600\nactive_file 9\n"
    group(root, "unit", memory_current=1000, memory_max=2000, memory_stat=stat)
    assert available_bytes(root) == 1600


def test_the_groups_above_count_too(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/slice/unit\n")
    group(root, "slice/unit", memory_current=1000, memory_max=5000)
    group(root, "slice", memory_current=9000, memory_max=9100)
    assert available_bytes(root) == 100


def test_in_a_container_its_own_group_is_the_topmost(root: Path) -> None:
    group(root, "", memory_current=10, memory_max=30)
    for path in ("/", "/docker/0123", "/../../unit", "nonsense"):
        write(root, "proc/self/cgroup", f"0::{path}\n")
        assert available_bytes(root) == 20, path


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "0:", "a:b", "0::/\0"])
def test_a_list_of_groups_that_is_none_limits_nothing(root: Path, text: str) -> None:
    write(root, "proc/self/cgroup", text)
    assert available_bytes(root) == BOARD


def test_where_the_board_has_no_figure_the_groups_have(tmp_path: Path) -> None:
    """As under systemd's ProcSubset=pid."""
    assert available_bytes(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/unit\n")
    group(tmp_path, "unit", memory_current=1, memory_max=5)
    assert available_bytes(tmp_path) == 4
