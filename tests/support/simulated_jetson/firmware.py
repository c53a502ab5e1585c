"""A SIMULATION of the slots of a Jetson: its UEFI variables, its boots, and `nvbootctrl`.

The rules are those of edk2-nvidia's L4TRootfsValidation (R35, R36) and of what was seen on boards:
every boot takes a try of the slot; at 0 the slot becomes unbootable (0xFF) and the other one boots;
with both unbootable nothing boots; writing the status 0 gives all tries back, and so does `verify`
for the slot that runs; without redundancy `set-active-boot-slot` does nothing, without an error.
No board has confirmed it. Variables are plain files here: efivarfs' rule of one write for each is
what `Firmware.boot` checks (8 bytes, the right attributes).
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
            firmware.write(f"RootfsRetryCount{slot}", TRIES)
        firmware.write("BootChainFwCurrent", 0)
        firmware.write("OsIndications", 0, GLOBAL)
        firmware.boot()
        firmware.nvbootctrl(["verify"])
        return firmware

    def boot(self) -> str | None:
        """Switch the power on; the slot that boots, None for the UEFI shell."""
        chain = self.read("BootChainFwNext")
        if chain is None:
            chain = self._current()
        self._path("BootChainFwNext").unlink(missing_ok=True)
        for slot in SLOTS:
            # The write of 0 is what gives the tries back: a newer status than the count.
            status, count = (self._path(f"Rootfs{n}{slot}") for n in ("StatusSlot", "RetryCount"))
            if not self._status(slot) and status.stat().st_mtime_ns > count.stat().st_mtime_ns:
                self.write(f"RootfsRetryCount{slot}", TRIES)
        for number in (chain, 1 - chain):
            slot = SLOTS[number]
            tries = self.read(f"RootfsRetryCount{slot}")
            if self._status(slot) == UNBOOTABLE:
                continue
            if not tries:
                self.write(f"RootfsStatusSlot{slot}", UNBOOTABLE)
                continue
            self.write("BootChainFwCurrent", number)
            self.write(f"RootfsRetryCount{slot}", tries - 1)
            return slot
        return None

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
                self.write(f"RootfsRetryCount{slot}", TRIES)
                return ""
            case ["dump-slots-info"]:
                return self._dump("rootfs" if rootfs else "bootloader")
        raise SystemExit(f"nvbootctrl (simulated): {arguments}: unknown")

    def tries(self, slot: str) -> int | None:
        return self.read(f"RootfsRetryCount{slot}")

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
        current = self.read("BootChainFwCurrent")
        assert current is not None
        return current

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
