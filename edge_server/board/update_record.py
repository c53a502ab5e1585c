"""Update record: what became of the last update of this device, for the fleet and the next boot.

It lies on the data partition, so both slots read and write it, and either may be older than the one
that wrote it. Later versions only add fields, and old ones ignore those; what an old one cannot
read at all has another `format`, and is left alone.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from edge_server.errors import SettingsError, Unavailable
from edge_server.process.disk import atomic_write, installed_state

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

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
    """`update/record.json` in the state directory; written by root, read by the daemon.

    Args:
        directory: the state directory; None for that of the installed daemon, or of this user.
    """

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
