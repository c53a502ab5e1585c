"""A place that the settings name cannot be used: whether that stays, or may pass."""

from __future__ import annotations

import errno

from edge_server.errors import SettingsError, Unavailable

# Something of the wrong kind is there: a link, a file, a pipe. A missing directory, a full disk or
# a missing right may be those of a disk that is mounted later.
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
    """What to raise with `text`, so that the daemon is started again only where that may help."""
    return (SettingsError if error.errno in _STAYS else Unavailable)(text)
