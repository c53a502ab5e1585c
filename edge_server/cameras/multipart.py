"""The parts of a multipart/x-mixed-replace stream, as network cameras send their JPEGs."""

from __future__ import annotations

import re

# JPEGs of 8K are smaller; a camera that never ends a part costs no more memory than this.
LONGEST_PART_BYTES = 2**25
_LONGEST_HEAD_BYTES = 8192
_LENGTH = re.compile(rb"(?im)^content-length[ \t]*:[ \t]*(\d{1,12})[ \t]*\r?$")
_HEAD_END = re.compile(rb"\r?\n\r?\n")


class MultipartError(ValueError):
    """The stream has no parts, or one that is too long; the text says which."""


class MultipartParser:
    """Cuts a stream into its parts; holds at most one part and what was fed last.

    Args:
        boundary: of the Content-Type. Cameras write it with and without its two leading hyphens.

    Raises:
        MultipartError: the boundary is empty.
    """

    def __init__(self, boundary: bytes) -> None:
        name = boundary.strip().strip(b'"').lstrip(b"-")
        if not name:
            raise MultipartError("its boundary is empty")
        self._delimiter = b"--" + name
        self._data = bytearray()
        self._scanned = 0
        self._useless = 0  # bytes since the last part
        self._begin: int | None = None  # of the body
        self._length: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._data += data

    def pop(self) -> bytes | None:
        """Return the body of the next part; None until the stream has brought it.

        Raises:
            MultipartError: a part, or what comes before it, is longer than
                `LONGEST_PART_BYTES`, or its head never ends.
        """
        if self._begin is None and not self._find_body():
            return None
        assert self._begin is not None  # noqa: S101  # for the type checker: it was found
        if self._length is not None:
            end = self._begin + self._length
            if len(self._data) < end:
                return None
        else:
            end = self._data.find(self._delimiter, max(self._begin, self._scanned))
            if end < 0:
                self._scanned = max(0, len(self._data) - len(self._delimiter))
                self._limit(len(self._data) - self._begin)
                return None
        body = bytes(memoryview(self._data)[self._begin : end])
        del self._data[:end]
        self._scanned, self._begin, self._length = 0, None, None
        return body

    def _find_body(self) -> bool:
        at = self._data.find(self._delimiter, self._scanned)
        if at < 0:
            # What comes between two parts is of no use.
            useless = max(0, len(self._data) - len(self._delimiter))
            del self._data[:useless]
            self._scanned = 0
            self._useless += useless
            if self._useless > LONGEST_PART_BYTES:
                raise MultipartError(f"no image begins within {LONGEST_PART_BYTES >> 20} MiB")
            return False
        end = _HEAD_END.search(self._data, at)
        if end is None:
            self._scanned = at
            if len(self._data) - at > _LONGEST_HEAD_BYTES:
                raise MultipartError("the head of an image never ends")
            return False
        length = _LENGTH.search(self._data, at, end.end())
        self._length = None if length is None else int(length[1])
        self._limit(self._length or 0)
        self._begin = self._scanned = end.end()
        self._useless = 0
        return True

    def _limit(self, part_bytes: int) -> None:
        if part_bytes > LONGEST_PART_BYTES:
            raise MultipartError(f"an image has more than {LONGEST_PART_BYTES >> 20} MiB")
