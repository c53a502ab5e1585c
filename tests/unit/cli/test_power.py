"""Power mode and clocks, against a stand-in for nvpmodel and jetson_clocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.cli.power import JETSON_CLOCKS, NVPMODEL, PowerControl
from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# As on an Orin NX with JetPack 6, shortened.
CONF = """\
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=10W >
< POWER_MODEL ID=3 NAME=25W >
< PM_CONFIG DEFAULT=1 >
"""


class Board:
    """A stand-in for NVIDIA's two programs: what they print is as published, and not seen here."""

    def __init__(self, root: Path) -> None:
        self.mode = 1
        self.needs_reboot: set[int] = set()
        self.clocks = "free"
        self.calls: list[str] = []
        self.fails = ""
        (root / "etc").mkdir()
        (root / "etc/nvpmodel.conf").write_text(CONF)
        self.kept = root / "clocks"
        self.control = PowerControl(root, self.run, self.kept)

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        self.calls.append(" ".join(command[1:]))
        if self.fails and self.fails == self.calls[-1]:
            return 255, "NVPM ERROR: Error opening /sys: 13\nNVPM ERROR: optMask is 2\n"
        if command[0] == NVPMODEL:
            if command[1] == "-q":
                return 0, f"NV Power Mode: MODE_{self.mode}\n{self.mode}\n"
            wanted = int(command[2])
            if wanted in self.needs_reboot:
                return 0, "NVPM WARN: Reboot required for changing to this power mode\n"
            self.mode = wanted
            return 0, ""
        assert command[0] == JETSON_CLOCKS
        if len(command) == 1:
            self.clocks = "max"
        elif command[1] == "--store":
            self.kept.write_text(self.clocks)
        else:
            self.clocks = self.kept.read_text()
        return 0, ""

    def apply(self, mode: str | None = None, clocks: str | None = None) -> list[str]:
        return list(self.control.apply(mode, clocks))


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


@pytest.mark.parametrize("name", ["MAXN", "maxn", "0"])
def test_a_mode_is_set_by_name_or_number(board: Board, name: str) -> None:
    assert board.apply(name) == ["power mode MAXN (0) set"]
    assert board.mode == 0


def test_a_mode_that_applies_is_not_set_again(board: Board) -> None:
    assert board.apply("10W") == ["power mode 10W (1) as before"]
    assert board.calls == ["-q"]


def test_a_mode_that_needs_a_reboot_is_named_and_nothing_reboots(board: Board) -> None:
    board.needs_reboot = {3}
    with pytest.raises(Unavailable, match=r"25W needs a reboot.*sudo nvpmodel -m 3"):
        board.apply("25W")
    assert board.mode == 1
    assert board.calls == ["-q", "-m 3", "-q"]


def test_a_mode_that_the_board_lacks_is_refused_with_those_it_has(board: Board) -> None:
    with pytest.raises(SettingsError, match=r"no mode '15W'; it has: MAXN \(0\), 10W \(1\), 25W"):
        board.apply("15W")
    assert board.calls == []


def test_a_machine_without_modes_says_so(board: Board, tmp_path: Path) -> None:
    (tmp_path / "etc/nvpmodel.conf").unlink()
    with pytest.raises(Unavailable, match="has no power modes"):
        board.apply("MAXN")


def test_a_failure_of_nvpmodel_is_quoted(board: Board) -> None:
    board.fails = "-m 0"
    with pytest.raises(Unavailable, match="nvpmodel -m 0: ended with 255: NVPM ERROR: optMask"):
        board.apply("MAXN")


def test_clocks_are_restored_to_those_of_before_and_only_once(board: Board) -> None:
    assert board.apply(clocks="max") == ["clocks at their highest"]
    # The second time must not keep the highest as those of before.
    board.apply(clocks="max")
    assert board.clocks == "max"
    assert board.apply(clocks="auto") == ["clocks restored"]
    assert board.clocks == "free"
    assert board.apply(clocks="auto") == ["clocks as the kernel sets them"]


def test_pinned_clocks_are_released_before_the_mode_changes(board: Board) -> None:
    board.apply(clocks="max")
    board.calls.clear()
    board.apply("MAXN", "max")
    assert board.calls.index(f"--restore {board.kept}") < board.calls.index("-m 0")
    assert (board.mode, board.clocks) == (0, "max")
