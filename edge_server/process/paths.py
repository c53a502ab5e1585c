"""Paths from outside: names that are not UTF-8, and places that cannot be used."""

from __future__ import annotations

import errno

from edge_server.errors import SettingsError, Unavailable

# Permanent: the path is of the wrong kind, e.g. a link, a file, a pipe. A missing directory, a full
# disk or a missing permission may belong to a disk that is mounted later.
_STAYS = frozenset(
    {
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ENXIO,
    }
)


def error_of_place(error: OSError, text: str) -> SettingsError | Unavailable:
    """Return the error for a path, so that systemd restarts the daemon only where a restart may
    help."""
    return (SettingsError if error.errno in _STAYS else Unavailable)(text)


def as_utf8(text: str) -> str:
    """Return `text` with each non-UTF-8 byte of a file name as an escape like `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
