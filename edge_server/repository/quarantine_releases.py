"""Requests to release digests from quarantine, as notes in the store's directory."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class QuarantineReleases:
    """Empty files in `releases` below a store, each named by a digest.

    The process that has the store open removes each note and releases its digest; a note may also
    be left while no daemon runs. The notes are empty, so the daemon need not read a file of another
    user, such as root, and the directory belongs to the store.
    """

    def __init__(self, store: Path) -> None:
        self._directory = store / "releases"

    def make(self) -> None:
        """Create the directory of the notes.

        Raises:
            OSError: the directory cannot be created.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def leave(self, digest: str) -> None:
        """Leave a note for `digest`.

        Raises:
            OSError: the note cannot be written, or the store was never opened.
        """
        (self._directory / digest).touch(mode=0o600)

    def is_left(self, digest: str) -> bool:
        """Return whether the note for `digest` is still pending."""
        return (self._directory / digest).exists()

    def take(self) -> list[str]:
        """Remove the notes and return their digests; a note that cannot be removed is left out."""
        taken = []
        try:
            for note in self._directory.iterdir():
                if _DIGEST.match(note.name):
                    note.unlink()
                    taken.append(note.name)
        except OSError as error:
            log.debug("model store: %s: %s", self._directory, error)
        return taken
