"""A SIMULATION of the slots of a Jetson: its UEFI variables, its boots, and `nvbootctrl`.

The rules are those of edk2-nvidia's L4TRootfsValidation.c (R36). The tries of both slots are in a
scratch register that survives a warm reset and is lost with the power. Every boot takes a try of
the slot; a slot without tries gets the status 0xFF, and the other one boots; where that has none
either, the recovery kernel boots. A register that is there is never filled again from a status:
only a boot without one gives a slot of status 0 all its tries.

`nvbootctrl` is closed. That `verify` gives the slot that runs all its tries back, and that
`dump-slots-info` prints the register's, are assumptions; so is that `set-active-boot-slot` does
nothing, without an error, where there is no redundancy (seen on boards). No board has confirmed any
of it. Variables are plain files here: efivarfs' rule of one write for each is what `Firmware.read`
checks (8 bytes, the right attributes).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VENDOR = "781e084c-a330-417c-b678-38e696380cb9"
GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
TRIES = 3
SLOTS = "AB"
UNBOOTABLE = 0xFF


class Firmware:
    """The firmware of a board whose files are below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._variables = root / "sys/firmware/efi/efivars"
        # SR_RF: the slot that was booted, the tries of A, those of B.
        self._register = root / "scratch-register"

    @classmethod
    def flashed(cls, root: Path, *, redundancy: int = 1) -> Firmware:
        """A board as `ROOTFS_AB=1` leaves it, booted once from A and verified."""
        firmware = cls(root)
        firmware._variables.mkdir(parents=True)
        labels = root / "dev/disk/by-partlabel"
        labels.mkdir(parents=True)
        for label in ("APP", "APP_b")[: 1 + redundancy]:
            (labels / label).write_bytes(b"")
        firmware.write("RootfsRedundancyLevel", redundancy)
        for slot in SLOTS:
            firmware.write(f"RootfsStatusSlot{slot}", 0)
        firmware.write("BootChainFwCurrent", 0)
        firmware.write("OsIndications", 0, GLOBAL)
        firmware.boot()
        firmware.nvbootctrl(["verify"])
        return firmware

    def cut_power(self) -> None:
        """The next boot is a cold one."""
        self._register.unlink(missing_ok=True)

    def boot(self) -> str | None:
        """Reset the board; the slot that boots, None for the recovery kernel."""
        chain = self.read("BootChainFwNext")
        if chain is not None:
            self.write("BootChainFwCurrent", chain)
            self._path("BootChainFwNext").unlink()
        chain = self.read("BootChainFwCurrent")
        assert chain is not None
        unbootable = [self._status(slot) == UNBOOTABLE for slot in SLOTS]
        tries = [self.tries(slot) for slot in SLOTS]
        if all(unbootable):
            self.cut_power()
            return None
        if not tries[chain]:
            self.write(f"RootfsStatusSlot{SLOTS[chain]}", UNBOOTABLE)
            chain = 1 - chain
            if not tries[chain]:
                self.write(f"RootfsStatusSlot{SLOTS[chain]}", UNBOOTABLE)
                self.cut_power()
                return None
            self.write("BootChainFwNext", chain)
        tries[chain] -= 1
        self._register.write_bytes(bytes([chain, *tries]))
        return SLOTS[chain]

    def nvbootctrl(self, arguments: Sequence[str]) -> str:
        """What the tool prints; the simulation knows no other calls."""
        rootfs = arguments[:2] == ["-t", "rootfs"]
        match arguments[2:] if rootfs else arguments:
            case ["get-current-slot"]:
                return f"{self._current()}\n"
            case ["set-active-boot-slot", ("0" | "1") as number]:
                if self.read("RootfsRedundancyLevel"):
                    self.write("BootChainFwNext", int(number))
                return ""
            case ["verify"]:
                slot = SLOTS[self._current()]
                self.write(f"RootfsStatusSlot{slot}", 0)
                self.set_tries(slot, TRIES)
                return ""
            case ["dump-slots-info"]:
                return self._dump("rootfs" if rootfs else "bootloader")
        raise SystemExit(f"nvbootctrl (simulated): {arguments}: unknown")

    def tries(self, slot: str) -> int:
        """The register's, or those that a boot without one would begin with."""
        if self._register.exists():
            return self._register.read_bytes()[1 + SLOTS.index(slot)]
        return 0 if self._status(slot) == UNBOOTABLE else TRIES

    def set_tries(self, slot: str, tries: int) -> None:
        register = bytearray(self._register.read_bytes())
        register[1 + SLOTS.index(slot)] = tries
        self._register.write_bytes(register)

    def read(self, name: str, vendor: str = VENDOR) -> int | None:
        path = self._path(name, vendor)
        if not path.exists():
            return None
        data = path.read_bytes()
        if not data:
            return None  # efivarfs: a file without a write is no variable
        attributes, value = struct.unpack("<II", data)
        assert attributes == 7, f"{name} was written with the attributes {attributes}"
        return int(value)

    def write(self, name: str, value: int, vendor: str = VENDOR) -> None:
        path = self._path(name, vendor)
        # One write, and no truncation: a power cut leaves the old value or the new one.
        with path.open("r+b" if path.exists() else "xb", buffering=0) as file:
            file.write(struct.pack("<II", 7, value))

    def _status(self, slot: str) -> int | None:
        return self.read(f"RootfsStatusSlot{slot}")

    def _current(self) -> int:
        return self._register.read_bytes()[0]

    def _dump(self, kind: str) -> str:
        chosen = self.read("BootChainFwNext")
        active = self._current() if chosen is None else chosen
        lines = [
            "Current version: 36.4.3",
            "Capsule update status: 0",
            f"Current {kind} slot: {SLOTS[self._current()]}",
            f"Active {kind} slot: {SLOTS[active]}",
            "num_slots: 2",
        ]
        for number, slot in enumerate(SLOTS):
            word = "unbootable" if self._status(slot) == UNBOOTABLE else "normal"
            count = f"             retry_count: {self.tries(slot)}," if kind == "rootfs" else ""
            lines.append(f"slot: {number},{count}             status: {word}")
        return "\n".join(lines) + "\n"

    def _path(self, name: str, vendor: str = VENDOR) -> Path:
        return self._variables / f"{name}-{vendor}"
