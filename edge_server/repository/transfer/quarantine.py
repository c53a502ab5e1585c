"""What a daemon's store will not load again, and how it is let out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import InternalError, NotFound, SettingsError
from edge_server.repository.quarantine_releases import QuarantineReleases
from edge_server.repository.state_file import StateFile

if TYPE_CHECKING:
    from pathlib import Path

# A daemon looks every second, but not while it copies a model.
PATIENCE_S = 5.0
_LOOK_S = 0.05


class Held(NamedTuple):
    """Content in quarantine; the name is empty where nobody noted it."""

    digest: str
    name: str
    reason: str


def held_back(store: Path) -> list[Held]:
    """All that is in quarantine and is to stay there; nothing where there is no store.

    Raises:
        SettingsError: the store may not be read.
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
    """Let all content out that is in quarantine for model `name`, or what of it begins so.

    Returns:
        Each digest, and whether a daemon has done so by now; else the next that opens the store
        does.

    Raises:
        NotFound: there is nothing of the kind.
        SettingsError: the store may not be read or written.
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
