"""Slots are switched only where the firmware follows, and never so that none could boot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.simulated_jetson.firmware import GLOBAL, TRIES, VENDOR, Firmware

from edge_server.board.update import BootSlots
from edge_server.errors import EdgeServerError, Unavailable, Unsupported

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def firmware(tmp_path: Path) -> Firmware:
    return Firmware.flashed(tmp_path / "board")


def slots_of(firmware: Firmware) -> BootSlots:
    return BootSlots(firmware.root, firmware.nvbootctrl)


def test_the_primary_slot_boots_next_with_all_its_tries(firmware: Firmware) -> None:
    slots = slots_of(firmware)
    assert (slots.current(), slots.primary()) == ("A", "A")
    slots.set_bad("B")
    assert not slots.is_good("B")
    slots.set_primary("B")
    assert (slots.current(), slots.primary()) == ("A", "B")
    assert slots.is_good("B")
    assert firmware.boot() == "B"
    assert (slots.current(), slots.tries("B")) == ("B", TRIES - 1)
    slots.set_good("B")
    assert slots.tries("B") == TRIES


def test_a_slot_that_is_never_verified_falls_back_to_the_other(firmware: Firmware) -> None:
    slots_of(firmware).set_primary("B")
    assert [firmware.boot() for _ in range(TRIES + 1)] == ["B"] * TRIES + ["A"]
    assert not slots_of(firmware).is_good("B")


def test_a_slot_that_burnt_its_tries_boots_again_only_after_the_power_was_cut(
    firmware: Firmware,
) -> None:
    slots = slots_of(firmware)
    firmware.set_tries("B", 0)
    slots.set_primary("B")
    assert (slots.primary(), slots.is_good("B"), slots.tries("B")) == ("B", True, 0)
    assert firmware.boot() == "A"
    slots.set_primary("B")
    firmware.cut_power()
    assert firmware.boot() == "B"


def test_a_tool_that_prints_no_tries_is_named(firmware: Firmware) -> None:
    with pytest.raises(Unavailable, match="has no retry_count of slot 1"):
        BootSlots(firmware.root, lambda _: "num_slots: 2\n").tries("B")


def test_a_board_without_slots_is_refused_with_the_remedy(tmp_path: Path) -> None:
    slots = slots_of(Firmware.flashed(tmp_path / "raw", redundancy=0))
    for refused in (lambda: slots.set_primary("B"), lambda: slots.set_bad("B")):
        with pytest.raises(Unsupported, match=r"RootfsRedundancyLevel is 0, not 1.*ROOTFS_AB=1"):
            refused()
    assert slots.primary() == "A"


def test_a_missing_second_partition_is_refused(firmware: Firmware) -> None:
    (firmware.root / "dev/disk/by-partlabel/APP_b").unlink()
    with pytest.raises(Unsupported, match="APP_b: missing"):
        slots_of(firmware).set_primary("B")


def test_a_waiting_bootloader_update_is_not_cancelled(firmware: Firmware) -> None:
    firmware.write("OsIndications", 4, GLOBAL)
    with pytest.raises(Unavailable, match="reboot first"):
        slots_of(firmware).set_primary("B")
    assert slots_of(firmware).primary() == "A"


def test_a_firmware_that_ignores_the_switch_is_an_error(firmware: Firmware) -> None:
    def silent(arguments: list[str]) -> str:
        return "" if "set-active-boot-slot" in arguments else firmware.nvbootctrl(arguments)

    with pytest.raises(Unavailable, match="slot B was chosen, and A would boot instead"):
        BootSlots(firmware.root, silent).set_primary("B")


def test_the_slot_that_runs_is_never_made_unbootable_and_only_it_is_good(
    firmware: Firmware,
) -> None:
    slots = slots_of(firmware)
    with pytest.raises(Unsupported, match="slot A runs"):
        slots.set_bad("A")
    with pytest.raises(Unsupported, match="only that can be good"):
        slots.set_good("B")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["primary A", "primary B", "bad A", "bad B", "verify", "boot", "cold"])
    )
)
def test_no_order_of_calls_leaves_a_board_that_boots_no_more(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    """As long as each boot that happens is verified, as edge-server-verify.service does."""
    firmware = Firmware.flashed(tmp_path_factory.mktemp("board"))
    slots = slots_of(firmware)
    for call in calls:
        verb, _, slot = call.partition(" ")
        try:
            match verb:
                case "primary":
                    slots.set_primary("A" if slot == "A" else "B")
                case "bad":
                    slots.set_bad("A" if slot == "A" else "B")
                case "verify":
                    slots.set_good(slots.current())
                case "boot" | "cold":
                    if verb == "cold":
                        firmware.cut_power()
                    assert firmware.boot() is not None
                    slots.set_good(slots.current())
        except EdgeServerError:
            pass
    assert firmware.boot() is not None


@pytest.mark.parametrize("data", [b"\7", b"\7\0\0\0", b"\7\0\0\0" + bytes(9)])
def test_a_variable_of_odd_length_is_no_number(firmware: Firmware, data: bytes) -> None:
    path = firmware.root / f"sys/firmware/efi/efivars/RootfsStatusSlotB-{VENDOR}"
    path.write_bytes(data)
    with pytest.raises(Unavailable, match=f"has {len(data)} bytes"):
        slots_of(firmware).is_good("B")
