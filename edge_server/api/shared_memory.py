"""System shared memory of clients: tensors that do not travel through the socket.

A region is a POSIX shared memory object that a client created under /dev/shm and registered here.
Inputs are copied out of it and outputs are written to it, both through the object's descriptor and
never through a mapping: a client may truncate its object at any moment, and the kernel would then
kill a process that reads a mapping; the client may also change the bytes between two reads.
Client shared memory is nevertheless off unless the operator allows it: a client that may register
reads and changes every object in /dev/shm whose name this user may open.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_server.api.admission import MIB, ByteBudget
from edge_server.errors import (
    AlreadyExists,
    InternalError,
    InvalidRequest,
    NotFound,
    Unavailable,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)

_RESERVED = "triton_python_backend_shm_region_"
_LARGEST = 2**64 - 1
# Each holds a descriptor, of the 1024 that a process has by default.
_MOST_REGIONS = 256
# Each name is kept until a client unregisters it.
_LONGEST_NAME = 1024


class SharedRegion:
    """A registered part of a shared memory object, open as long as the region is referenced."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int, path: Path) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        try:
            # Refuse a link out of the directory, and do not block on a FIFO or device.
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(path, flags)
        except (OSError, ValueError) as error:
            raise InternalError(f"Unable to open shared memory region: '{key}'") from error
        weakref.finalize(self, os.close, self._file)
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise InternalError(f"Unable to open shared memory region: '{key}'")
        if byte_size == 0 or offset + byte_size > found.st_size:
            raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")

    def read(self, offset: int, byte_size: int) -> NDArray[np.uint8]:
        """Return a copy of these bytes; raise InvalidRequest where the object has shrunk."""
        copy = np.empty(byte_size, np.uint8)
        place, left = self.offset + offset, memoryview(copy)
        while left:
            read = os.preadv(self._file, [left], place)
            if not read:
                raise self._smaller()
            place, left = place + read, left[read:]
        copy.flags.writeable = False
        return copy

    def write(self, offset: int, data: memoryview) -> None:
        """Raises: InvalidRequest: the object has shrunk. InternalError: the write fails."""
        place = self.offset + offset
        if os.fstat(self._file).st_size < place + data.nbytes:
            raise self._smaller()
        try:
            while data.nbytes:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written
        except OSError as error:
            raise InternalError(
                f"shared memory region '{self.name}' cannot be written to: {error.strerror}"
            ) from error

    def _smaller(self) -> InvalidRequest:
        return InvalidRequest(
            f"shared memory region '{self.name}' has become smaller than it was registered"
        )


@dataclass(frozen=True)
class RegionSlice:
    """The part of a region that holds one tensor of a request; within the region's bounds."""

    region: SharedRegion
    offset: int
    byte_size: int
    of: SharedMemory

    def read(self) -> memoryview:
        """Return a copy of the slice.

        Raises:
            InvalidRequest: the slice is longer than a tensor may be, or the object has shrunk.
            Unavailable: the budget has no room for a copy.
        """
        return self.of.copy_of(self)

    def write(self, name: str, data: memoryview) -> None:
        """Raises: InternalError: the output `name` does not fit."""
        if data.nbytes > self.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{name}' "
                f"({self.byte_size} bytes) should be at least {data.nbytes} bytes to hold the "
                "results"
            )
        self.region.write(self.offset, data)


class SharedMemory:
    """The regions that clients have registered, by name; safe from any thread.

    Args:
        budget: counts the bytes of copied inputs as long as they are referenced.
        longest_bytes: of one input: a sparse object may be larger than all memory.
    """

    def __init__(
        self,
        directory: Path = Path("/dev/shm"),  # noqa: S108 - that is POSIX's place
        budget: ByteBudget | None = None,
        longest_bytes: int = 64 * MIB,
    ) -> None:
        self._directory = directory
        self._budget = budget or ByteBudget()
        self._longest_bytes = longest_bytes
        self._lock = threading.Lock()
        self._regions: dict[str, SharedRegion] = {}
        # Unregistered while a request still writes its outputs there: listed until that is done.
        self._leaving: weakref.WeakValueDictionary[str, SharedRegion] = (
            weakref.WeakValueDictionary()
        )

    def counted_by(self, budget: ByteBudget) -> SharedMemory:
        """Return the same regions, whose copied inputs count in `budget`."""
        made = SharedMemory(self._directory, budget, self._longest_bytes)
        made._lock, made._regions, made._leaving = self._lock, self._regions, self._leaving
        return made

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register the object `key` of the clients as the region `name`.

        Raises: AlreadyExists, InvalidRequest, InternalError, Unavailable: Triton's texts, or too
        many.
        """
        if key.lstrip("/").startswith(_RESERVED):
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' with key '{key}' as the key "
                f"contains the reserved prefix '{_RESERVED}'"
            )
        file = key.lstrip("/")
        if not name or not file:
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' - invalid shm key '{key}'"
            )
        if len(name) > _LONGEST_NAME:
            raise InvalidRequest(
                f"the name of a shared memory region has {len(name)} characters, at most "
                f"{_LONGEST_NAME} are allowed"
            )
        if "/" in file or file in (".", ".."):
            raise InternalError(f"Unable to open shared memory region: '{key}'")
        with self._lock:
            if name in self._regions or name in self._leaving:
                raise AlreadyExists(f"shared memory region '{name}' already in manager")
            if len(self._regions) == _MOST_REGIONS:
                raise Unavailable(
                    f"{_MOST_REGIONS} shared memory regions are registered already; unregister "
                    "those that are not used"
                )
            self._regions[name] = SharedRegion(name, key, offset, byte_size, self._directory / file)

    def unregister(self, name: str) -> None:
        """Remove a region, or all if `name` is empty; requests that use it keep it, and it is
        listed so long.
        """
        with self._lock:
            for each in [name] if name else list(self._regions):
                if (region := self._regions.pop(each, None)) is not None:
                    self._leaving[each] = region

    def regions(self, name: str) -> list[SharedRegion]:
        """Return the region `name`, or all if it is empty; raise NotFound where no region has that
        name.
        """
        with self._lock:
            # By its items: a request may end meanwhile, and its region with it.
            listed = dict(self._leaving.items()) | self._regions
            if not name:
                return list(listed.values())
            if name not in listed:
                raise NotFound(f"Unable to find system shared memory region: '{name}'")
            return [listed[name]]

    def find(self, name: str, offset: int, byte_size: int) -> RegionSlice:
        """Return a part of a region; `offset` and `byte_size` are signed in the request, and read
        as unsigned.

        Raises: NotFound, InvalidRequest: Triton's texts.
        """
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        offset, byte_size = offset & _LARGEST, byte_size & _LARGEST
        if offset >= region.byte_size:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
        if offset + byte_size > _LARGEST:
            raise InvalidRequest(
                f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds "
                f"maximum value ({_LARGEST}) for region '{name}'"
            )
        if offset + byte_size > region.byte_size:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")
        return RegionSlice(region, offset, byte_size, self)

    def copy_of(self, place: RegionSlice) -> memoryview:
        """See `RegionSlice.read`."""
        size_bytes = place.byte_size
        if size_bytes > self._longest_bytes:
            raise InvalidRequest(
                f"a tensor of {size_bytes} bytes in shared memory region '{place.region.name}' is "
                f"not read; it has {self._longest_bytes} at most (grpc.max_message_bytes)"
            )
        self._budget.take(size_bytes)
        try:
            copy = place.region.read(place.offset, size_bytes)
        except BaseException:
            self._budget.give(size_bytes)
            raise
        weakref.finalize(copy, self._budget.give, size_bytes)
        return memoryview(copy)
