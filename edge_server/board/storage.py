"""The disks of the board and how worn they are, as far as files of the kernel report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.kernel_files import listed, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

# JESD84-B51, EXT_CSD: 1 is up to 10 % of the life used, 10 up to 100 %, 11 beyond it; 0 is unknown.
_LIFE_STEPS = range(1, 12)
_PRE_EOL = {"0x01": "normal", "0x02": "warning", "0x03": "urgent"}


@dataclass(frozen=True)
class StorageDevice:
    """One disk; None where its kernel files do not report a fact.

    The wear of an NVMe is not among its files: `doctor` asks the drive, as root.

    Attributes:
        model: the maker's name for it.
        worn: upper bound of the used share of its life, 0..1; beyond 1 it may fail any time.
        end_of_life: `normal`, `warning` (80 % of its spare blocks are used) or `urgent`.
        celsius: of an NVMe.
    """

    name: str
    model: str | None = None
    worn: float | None = None
    end_of_life: str | None = None
    celsius: float | None = None


def read_storage(root: Path) -> tuple[StorageDevice, ...]:
    """Read the NVMe drives and eMMC or SD cards of the board below `root`."""
    drives = []
    for drive in listed(root / "sys/class/nvme", "nvme*"):
        # The kernel's hwmon of a drive; its place differs between kernels.
        sensors = [*listed(drive, "hwmon*/temp1_input"), *listed(drive, "hwmon/hwmon*/temp1_input")]
        millidegrees = next(map(read_number, sensors), None)
        celsius = None if millidegrees is None else millidegrees / 1000
        drives.append(StorageDevice(drive.name, read_text(drive / "model"), celsius=celsius))
    for card in listed(root / "sys/block", "mmcblk[0-9]"):
        device = card / "device"
        # Two estimates, of the blocks of one bit per cell and of the others.
        steps = [_hex(word) for word in (read_text(device / "life_time") or "").split()]
        worst = max((step for step in steps if step in _LIFE_STEPS), default=None)
        drives.append(
            StorageDevice(
                card.name,
                read_text(device / "name"),
                None if worst is None else worst / 10,
                _PRE_EOL.get(read_text(device / "pre_eol_info") or ""),
            )
        )
    return tuple(drives)


def _hex(word: str) -> int:
    try:
        return int(word, 16)
    except ValueError:
        return 0
