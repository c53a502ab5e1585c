"""The boot slots of a Jetson, between which an update switches, and the record of the last one.

The slots are the two root file systems of a Jetson. NVIDIA's UEFI (L4T R35 and later) keeps a
status for each, and its tries in a register that is lost with the power. Every boot takes a try,
`nvbootctrl verify` gives them back; a slot without tries becomes unbootable, and a board without a
bootable slot ends in the recovery kernel. So every boot that is not a trial is verified
(`jetpack/update/guard`). The status alone gives a slot that burnt its tries none back before the
power is cut: `tries` tells. This was tried against a simulation of that firmware, not yet on a
board.

The record lies on the data partition, so both slots read and write it, and either may be older than
the one that wrote it. Later versions only add fields, and old ones ignore those; what an old one
cannot read at all has another `format`, and is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edge_server.errors import SettingsError, Unavailable, Unsupported
from edge_server.process.disk import atomic_write, installed_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

Slot = Literal["A", "B"]
SLOTS: tuple[Slot, Slot] = ("A", "B")
PARTITIONS: dict[Slot, str] = {"A": "APP", "B": "APP_b"}

_EFIVARS = "sys/firmware/efi/efivars"
_NVIDIA = "781e084c-a330-417c-b678-38e696380cb9"
_EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
# UEFI 2.10, 8.2: non-volatile, visible to boot services, visible at run time.
_ATTRIBUTES = 7
# Attributes, and a number of 1 to 8 bytes.
_SHORTEST, _LONGEST = 5, 12
_NORMAL, _UNBOOTABLE = 0, 0xFF
# UEFI 2.10, 8.5.4: EFI_OS_INDICATIONS_FILE_CAPSULE_DELIVERY_SUPPORTED.
_CAPSULE_WAITS = 4
# linux/fs.h
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
_TIMEOUT_S = 30.0
_LONGEST_REASON = 300


def _nvbootctrl(arguments: Sequence[str]) -> str:
    """Raises: Unavailable: NVIDIA's tool is missing, fails or hangs."""
    command = " ".join(("nvbootctrl", *arguments))
    try:
        done = subprocess.run(  # noqa: S603
            ["nvbootctrl", *arguments],  # noqa: S607 - /usr/sbin on a Jetson, found as root finds it
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command}: {getattr(error, 'strerror', None) or 'hangs'}") from error
    if done.returncode:
        reason = done.stderr.strip()[-_LONGEST_REASON:]
        raise Unavailable(f"{command}: ended with {done.returncode}: {reason}")
    return done.stdout


class BootSlots:
    """The slots of this board; `nvbootctrl` runs NVIDIA's tool, and returns its output."""

    def __init__(
        self, root: Path = Path("/"), nvbootctrl: Callable[[Sequence[str]], str] = _nvbootctrl
    ) -> None:
        self._root = root
        self._nvbootctrl = nvbootctrl

    def current(self) -> Slot:
        return _slot_number(self._nvbootctrl(["-t", "rootfs", "get-current-slot"]).strip())

    def primary(self) -> Slot:
        found = re.search(
            r"^Active \w+ slot: ([AB])\s*$", self._nvbootctrl(["dump-slots-info"]), re.MULTILINE
        )
        if found is None:
            raise Unavailable("nvbootctrl dump-slots-info: names no active slot")
        return SLOTS["AB".index(found[1])]

    def is_good(self, slot: Slot) -> bool:
        return self._read(_status_of(slot)) != _UNBOOTABLE

    def set_primary(self, slot: Slot) -> None:
        """Make `slot` the one that boots next; durable on return.

        A slot that has no `tries` boots only after the power was cut.

        Raises:
            Unsupported: this board has no second slot, or the firmware ignores it.
            Unavailable: a firmware update waits, which a switch would cancel; or the firmware did
                not take the switch.
        """
        self.require_switch()
        self._write(_status_of(slot), _NORMAL)
        self._nvbootctrl(["-t", "rootfs", "set-active-boot-slot", str(SLOTS.index(slot))])
        if (found := self.primary()) != slot:
            raise Unavailable(f"slot {slot} was chosen, and {found} would boot instead")

    def tries(self, slot: Slot) -> int:
        """Return how often the firmware would boot the slot before it is verified."""
        number = SLOTS.index(slot)
        found = re.search(
            rf"^slot: {number},\s*retry_count: (\d+)",
            self._nvbootctrl(["-t", "rootfs", "dump-slots-info"]),
            re.MULTILINE,
        )
        if found is None:
            raise Unavailable(f"nvbootctrl dump-slots-info: has no retry_count of slot {number}")
        return int(found[1])

    def set_good(self, slot: Slot) -> None:
        """Give the slot that runs all its tries back; Unsupported for the other slot, of which
        nothing is known."""
        if slot != (current := self.current()):
            raise Unsupported(f"slot {slot} does not run, {current} does: only that can be good")
        self._nvbootctrl(["verify"])

    def set_bad(self, slot: Slot) -> None:
        """Keep the firmware from booting a slot until `set_primary`; Unsupported for the slot that
        runs: with both slots bad the board would boot no more."""
        self.require_redundancy()
        if slot == self.current():
            raise Unsupported(f"slot {slot} runs: choose the other one, it need not be bad")
        self._write(_status_of(slot), _UNBOOTABLE)

    def require_switch(self) -> None:
        """Raises: Unsupported, Unavailable: see `set_primary`, which would change nothing."""
        self.require_redundancy()
        if (self._read("OsIndications", _EFI_GLOBAL) or 0) & _CAPSULE_WAITS:
            raise Unavailable(
                "an update of the bootloader waits for the next boot, and a switch of slots would "
                "cancel it: reboot first"
            )

    def require_redundancy(self) -> None:
        """Raises: Unsupported: the firmware would ignore a switch without an error."""
        level = self._read("RootfsRedundancyLevel")
        if level != 1:
            raise Unsupported(
                f"RootfsRedundancyLevel is {'missing' if level is None else level}, not 1: the "
                "firmware ignores slots; flash the board with ROOTFS_AB=1, its QSPI too"
            )
        other = self._root / "dev/disk/by-partlabel" / PARTITIONS["B"]
        if not other.exists():
            raise Unsupported(f"{other}: missing; flash the board with ROOTFS_AB=1")

    def _path(self, name: str, vendor: str = _NVIDIA) -> Path:
        return self._root / _EFIVARS / f"{name}-{vendor}"

    def _read(self, name: str, vendor: str = _NVIDIA) -> int | None:
        try:
            data = self._path(name, vendor).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"{self._path(name, vendor)}: {error.strerror}") from error
        # efivarfs: 4 bytes of attributes, then the value; a file without a write is no variable.
        if not data:
            return None
        if not _SHORTEST <= len(data) <= _LONGEST:
            raise Unavailable(
                f"{self._path(name, vendor)}: has {len(data)} bytes, which is no attributes and "
                "number: it is not read as one, and no slot is switched by it"
            )
        return int.from_bytes(data[4:], "little")

    def _write(self, name: str, value: int) -> None:
        """Write in one call, as efivarfs demands: a second one would be another variable."""
        path = self._path(name)
        try:
            _make_mutable(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, struct.pack("<II", _ATTRIBUTES, value))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Unavailable(
                f"{path}: {error.strerror}; as root, with efivarfs mounted to be written (mount -o "
                "remount,rw)"
            ) from error
        if self._read(name) != value:
            raise Unavailable(f"{path}: the firmware did not take the value {value}")


def _status_of(slot: Slot) -> str:
    return f"RootfsStatusSlot{slot}"


def _slot_number(text: str) -> Slot:
    if text not in ("0", "1"):
        raise Unavailable(f"nvbootctrl get-current-slot: {text[:_LONGEST_REASON]!r} is no slot")
    return SLOTS[int(text)]


def _make_mutable(path: Path) -> None:
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A file system without these flags has nothing to take away.
            with suppress(OSError):
                flags = bytearray(8)
                fcntl.ioctl(descriptor, _GET_FLAGS, flags)
                (present,) = struct.unpack_from("i", flags)
                if present & _IMMUTABLE:
                    fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("q", present & ~_IMMUTABLE))
        finally:
            os.close(descriptor)


FORMAT = 1
# The state directory of the unit; on an image, a directory of the data partition.
_LONGEST_BYTES = 65536


class UpdateRecord(msgspec.Struct, frozen=True):
    """The fields, in the order that `jetpack/update/guard` reads them.

    Attributes:
        state: none; pending, from the switch of slots to the verdict on the new system; committed;
            rolled_back; failed, where no new system was tried; cancelled.
        target: the slot of the new system; empty where the update has no slots.
        before: the slot that the update was made from.
        slot: the slot that ran when this was written.
        version: of edge-server in that slot.
        result: one sentence for people.
        fault: why the new system was not healthy, which the old one reports.
        engine: rauc, mender or the like.
        boot_id: of the boot that this was written in.
        changed_s: when the state changed, by this device's clock; seconds since 1970.
    """

    state: str = "none"
    target: str = ""
    before: str = ""
    slot: str = ""
    version: str = ""
    result: str = ""
    fault: str = ""
    engine: str = ""
    boot_id: str = ""
    changed_s: int = 0
    format: int = FORMAT

    def is_trial(self, slot: str) -> bool:
        """Return whether the system in `slot` is the new one, without a verdict so far."""
        return self.state == "pending" and self.target == slot


class RecordFile:
    """`update/record.json` in the state directory, by default of the installed daemon or of this
    user; written by root, read by the daemon."""

    def __init__(self, directory: Path | None = None) -> None:
        self.path = (directory or installed_state()) / "update" / "record.json"
        self._stamp: tuple[int, int, int] | None = None
        self._last = UpdateRecord()
        self._logged = ""

    def read(self) -> UpdateRecord:
        """Return the record; an empty one where there is none, or none that can be read.

        Cheap when the file has not changed.
        """
        try:
            status = self.path.stat()
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._last = _decode(self.path)
                self._stamp = stamp
        except FileNotFoundError:
            self._stamp, self._last = None, UpdateRecord()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._stamp, self._last = None, UpdateRecord()
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning("update: %s is not used: %s", self.path, error)
        return self._last

    def write(self, record: UpdateRecord) -> None:
        """Return when `record` is durable; until then the one before is.

        Raises:
            SettingsError: the directory belongs to somebody else, or is a link.
            Unavailable: the disk is full, or not there.
        """
        directory = self.path.parent
        try:
            directory.mkdir(mode=0o755, exist_ok=True)
            status = directory.lstat()
            # The daemon owns the directory above: what it may have put here is not followed.
            if not directory.is_dir() or directory.is_symlink() or status.st_uid != os.geteuid():
                raise SettingsError(f"{directory}: is no directory of this user; remove it")
            beside = directory / "record.json.new"
            atomic_write(self.path, msgspec.json.encode(record), mode=0o644, beside=beside)
        except OSError as error:
            raise Unavailable(f"{self.path}: {error.strerror}") from error


def _decode(path: Path) -> UpdateRecord:
    with path.open("rb") as file:
        data = file.read(_LONGEST_BYTES)
    record = msgspec.json.decode(data, type=UpdateRecord)
    if record.format != FORMAT:
        raise ValueError(f"it is of format {record.format}, this is {FORMAT}")
    return record
