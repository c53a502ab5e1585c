"""Read a text file that settings name, whatever kind of file it turns out to be, and TOML."""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LONGEST_BYTES = 16 * 2**20
# A pipe (`--config <(...)`) has this long to deliver.
WAIT_S = 5.0

TomlError = tomllib.TOMLDecodeError


def read_text_file(path: str | os.PathLike[str], wait_s: float = WAIT_S) -> str:
    """Return the contents, without the byte order mark that some editors put at the begin.

    Returns or raises within about `wait_s`, also for a pipe without a writer and a device without
    an end.

    Raises:
        OSError: the file cannot be read, is longer than `LONGEST_BYTES`, or its writer is late.
        UnicodeDecodeError: it is not UTF-8.
    """
    until = time.monotonic() + wait_s
    # O_NONBLOCK: the open of a pipe must not wait for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        data = bytearray()
        while poll.poll(max(0.0, 1e3 * (until - time.monotonic()))):
            if not (piece := os.read(file, 2**20)):
                return data.decode("utf-8").removeprefix("\ufeff")
            data += piece
            if len(data) > LONGEST_BYTES:
                raise OSError(errno.EFBIG, f"it is longer than {LONGEST_BYTES // 2**20} MiB")
        raise OSError(errno.ETIMEDOUT, f"it is a pipe, and its writer is late by {wait_s:g} s")
    finally:
        os.close(file)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of `text`.

    Raises:
        TomlError, a ValueError: it is not TOML.
        ValueError: a number has more digits than Python converts.
        RecursionError: it is nested too deep.
    """
    table: dict[str, Any] = tomllib.loads(text)
    return table
