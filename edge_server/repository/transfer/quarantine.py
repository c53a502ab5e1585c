"""Lists and releases the quarantined content of a daemon's store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import InternalError, NotFound, SettingsError
from edge_server.repository.quarantine_releases import QuarantineReleases
from edge_server.repository.state_file import StateFile

if TYPE_CHECKING:
    from pathlib import Path

# A daemon checks for releases every second, except while it copies a model.
PATIENCE_S = 5.0
_LOOK_S = 0.05


class Held(NamedTuple):
    """Quarantined content; the name is empty if the store has none for it."""

    digest: str
    name: str
    reason: str


def held_back(store: Path) -> list[Held]:
    """Return the quarantined content without a pending release; an empty list without a store.

    Raises:
        SettingsError: the store cannot be read.
    """
    try:
        state, quarantine_releases = StateFile(store).look(), QuarantineReleases(store)
        return [
            Held(digest, state.quarantined_as.get(digest, ""), reason)
            for digest, reason in state.quarantined.items()
            if not quarantine_releases.is_left(digest)
        ]
    except OSError as error:
        raise _unusable(store, error) from error


def release(
    store: Path, name: str, digest: str = "", *, patience_s: float = PATIENCE_S
) -> dict[str, bool]:
    """Release the quarantined content of model `name` whose digest begins with `digest`.

    Args:
        store: the directory of the store.
        name: the model.
        digest: the beginning of the digest; empty releases all content of the model.
        patience_s: the longest wait for a running daemon, in seconds.

    Returns:
        Digest → whether a daemon has released it already; otherwise the next daemon that opens the
        store does.

    Raises:
        NotFound: no such content is quarantined.
        SettingsError: the store cannot be read or written.
        InternalError: no daemon of this version has opened the store.
    """
    wanted = [
        held
        for held in held_back(store)
        if held.digest.startswith(digest) and (held.name == name or (digest and not held.name))
    ]
    if not wanted:
        of = f" that begins with {digest}" if digest else ""
        raise NotFound(f"{name}: nothing{of} is in quarantine in {store}")
    quarantine_releases = QuarantineReleases(store)
    try:
        for held in wanted:
            quarantine_releases.leave(held.digest)
    except FileNotFoundError as error:
        raise InternalError(
            f"model store {store}: no daemon of this version has opened it; start it, then again"
        ) from error
    except OSError as error:
        raise _unusable(store, error) from error
    end = time.monotonic() + patience_s
    while any(quarantine_releases.is_left(h.digest) for h in wanted) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return {held.digest: not quarantine_releases.is_left(held.digest) for held in wanted}


def _unusable(store: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"model store {store}: {error.strerror or error}; run this as root or the daemon's user, "
        "or name the store with --store"
    )
