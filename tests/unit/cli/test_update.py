"""A new system is kept when it is healthy; otherwise the one before boots again, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.simulated_jetson.firmware import GLOBAL, TRIES, Firmware

from edge_server.board.update import BootSlots, RecordFile
from edge_server.cli.main import run_command
from edge_server.cli.update import UpdatedDevice
from edge_server.errors import Unavailable, Unsupported

if TYPE_CHECKING:
    from pathlib import Path


class Board:
    """A simulated board with one daemon version per slot; healthy where nobody says otherwise."""

    def __init__(self, root: Path) -> None:
        self.firmware = Firmware.flashed(root / "board")
        self.state = root / "data"
        self.state.mkdir()
        self.faults: dict[str, str] = {}
        self.boots = 1

    def device(self) -> UpdatedDevice:
        slots = BootSlots(self.firmware.root, self.firmware.nvbootctrl)
        version = {"A": "1.0", "B": "2.0"}[slots.current()]
        return UpdatedDevice(
            slots, RecordFile(self.state), f"boot-{self.boots}", version, lambda: 1e9
        )

    def boot(self) -> str:
        self.boots += 1
        slot = self.firmware.boot()
        assert slot is not None
        return slot

    def commit(self) -> str:
        device = self.device()
        return device.commit(lambda: self.faults.get(device.slots.current(), ""))

    @property
    def record(self) -> tuple[str, str, str]:
        record = RecordFile(self.state).read()
        return record.state, record.slot, record.version


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_a_healthy_new_system_is_kept(board: Board) -> None:
    board.device().switch("B", "rauc")
    assert board.record == ("pending", "A", "1.0")
    assert board.boot() == "B"
    board.commit()
    assert board.record == ("committed", "B", "2.0")
    assert (board.firmware.tries("B"), board.boot()) == (TRIES, "B")
    board.commit()
    assert board.record == ("committed", "B", "2.0")


def test_a_switch_that_is_refused_is_no_pending_update(board: Board) -> None:
    board.firmware.write("OsIndications", 4, GLOBAL)
    with pytest.raises(Unavailable, match="an update of the bootloader waits"):
        board.device().switch("B", "rauc")
    assert RecordFile(board.state).read().state == "none"


def test_an_unhealthy_new_system_goes_back_and_the_old_one_says_why(board: Board) -> None:
    board.faults["B"] = "camera:front: no frames arrive"
    board.device().switch("B", "rauc")
    assert board.boot() == "B"
    with pytest.raises(Unavailable, match="slot A boots next"):
        board.commit()
    assert board.boot() == "A"
    board.commit()
    assert board.record == ("rolled_back", "A", "1.0")
    assert "no frames arrive" in RecordFile(board.state).read().result
    assert board.boot() == "A"


def test_a_new_system_that_never_reaches_its_verdict_falls_back(board: Board) -> None:
    board.device().switch("B", "rauc")
    assert [board.boot() for _ in range(TRIES + 1)] == ["B"] * TRIES + ["A"]
    board.commit()
    assert board.record == ("rolled_back", "A", "1.0")
    assert "did not start" in RecordFile(board.state).read().result


def test_an_installed_update_waits_for_its_reboot_without_a_verdict(board: Board) -> None:
    board.device().switch("B", "rauc")
    board.commit()
    assert board.record == ("pending", "A", "1.0")
    assert board.boot() == "B"


def test_choosing_the_present_slot_again_cancels_the_update(board: Board) -> None:
    board.device().switch("B", "rauc")
    board.device().switch("A", "rauc")
    assert board.record == ("cancelled", "A", "1.0")
    assert board.boot() == "A"


def test_a_system_that_is_not_on_trial_is_kept_whatever_its_health(board: Board) -> None:
    board.faults["A"] = "mqtt: no connection to the broker"
    for _ in range(3 * TRIES):
        board.boot()
        assert board.commit() == "slot A is not on trial, and is kept"
    assert (board.firmware.tries("A"), board.device().slots.primary()) == (TRIES, "A")


def test_a_slot_without_tries_is_said_to_need_a_power_cycle(board: Board) -> None:
    board.firmware.set_tries("B", 0)
    board.device().switch("B", "rauc")
    assert "power-cycle needed" in RecordFile(board.state).read().result
    assert board.boot() == "A"
    board.commit()
    assert board.record == ("rolled_back", "A", "1.0")
    assert "no tries left when it was chosen" in RecordFile(board.state).read().result
    board.device().switch("B", "rauc")
    board.firmware.cut_power()
    assert board.boot() == "B"
    board.commit()
    assert board.record == ("committed", "B", "2.0")


def test_a_second_update_after_a_rollback_works(board: Board) -> None:
    board.faults["B"] = "bad"
    board.device().switch("B", "rauc")
    board.boot()
    with pytest.raises(Unavailable):
        board.commit()
    board.boot()
    board.commit()
    board.faults.clear()
    board.device().switch("B", "rauc")
    assert board.boot() == "B"
    board.commit()
    assert board.record == ("committed", "B", "2.0")


def test_a_slot_chosen_by_hand_during_the_wait_for_health_is_left_chosen(board: Board) -> None:
    board.device().switch("B", "rauc")
    assert board.boot() == "B"

    def goes_back() -> str:
        board.device().switch("A")
        return ""

    assert board.device().commit(goes_back) == "slot B is no longer on trial"
    assert board.device().commit(lambda: "") == "slot B was given up in this boot"
    board.faults["A"] = "mqtt: no connection to the broker"
    assert (board.record[0], board.boot()) == ("pending", "A")
    board.commit()
    assert board.record == ("rolled_back", "A", "1.0")
    assert "given up by hand" in RecordFile(board.state).read().result


def test_a_system_on_trial_keeps_the_one_to_go_back_to_and_gets_no_tries(board: Board) -> None:
    board.device().switch("B", "rauc")
    assert board.boot() == "B"
    with pytest.raises(Unavailable, match="A has the system to go back to"):
        board.device().set_bad("A")
    with pytest.raises(Unavailable, match="update commit judges it"):
        board.device().set_good("B")
    assert board.firmware.tries("B") == TRIES - 1
    assert board.device().slots.is_good("A")
    board.commit()
    board.device().set_good("B")
    board.device().set_bad("A")
    assert not board.device().slots.is_good("A")


def test_an_engine_without_slots_leaves_the_record_of_a_pending_slot(board: Board) -> None:
    board.device().switch("B", "rauc")
    flags = ["--engine", "mender", "--state-directory", str(board.state)]
    assert run_command(["update", "record", "pending", *flags]) == 69
    assert board.boot() == "B"
    assert RecordFile(board.state).read().is_trial("B")


def test_a_board_without_slots_notes_nothing(tmp_path: Path) -> None:
    firmware = Firmware.flashed(tmp_path / "raw", redundancy=0)
    record = RecordFile(tmp_path)
    device = UpdatedDevice(BootSlots(firmware.root, firmware.nvbootctrl), record, "boot", "1.0")
    with pytest.raises(Unsupported):
        device.switch("B")
    assert not record.path.exists()


def test_an_update_without_slots_is_noted_and_judged_by_its_own_engine(board: Board) -> None:
    flags = ["--engine", "mender", "--state-directory", str(board.state)]
    assert run_command(["update", "record", "pending", *flags, "--result", "1 by 2"]) == 0
    board.boot()
    board.commit()
    assert board.record == ("pending", "A", "1.0")
    record = RecordFile(board.state).read()
    assert (record.engine, record.result, record.target) == ("mender", "1 by 2", "")


@pytest.mark.parametrize(
    "arguments", [["get-primary", "A"], ["set-primary"], ["get-state"], ["set-state", "A"]]
)
def test_a_wrong_number_of_arguments_is_usage(arguments: list[str]) -> None:
    assert run_command(["update", "slot", *arguments]) == 2


def test_a_record_that_this_user_may_not_read_is_not_taken_for_none(
    board: Board, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    directory = ["--state-directory", str(board.state)]
    monkeypatch.setattr(type(board.state), "stat", refuse)
    assert run_command(["update", "status", *directory]) == 69
    said = capsys.readouterr()
    assert said.out == ""
    assert "record.json: Permission denied; run this as root" in said.err


def test_a_state_directory_that_is_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_command(["update", "status", "--state-directory", str(tmp_path / "file")]) == 69
    assert "record.json: Not a directory; check the path" in capsys.readouterr().err


def test_the_last_update_is_shown(board: Board, capsys: pytest.CaptureFixture[str]) -> None:
    board.device().switch("B", "rauc")
    directory = ["--state-directory", str(board.state)]
    assert run_command(["update", "status", *directory]) == 0
    assert capsys.readouterr().out == "pending, slot A: slot B is to boot; A runs\n"
    assert run_command(["update", "status", "--json", *directory]) == 0
    assert '"target": "B"' in capsys.readouterr().out
