"""Who may leave quarantine: notes in the store, left whether a daemon has it open or not."""

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

    Whoever has the store open takes them away and acts on them. Their names say it all: a note of
    another user, as root is, needs no reading, and its directory is the store's own.
    """

    def __init__(self, store: Path) -> None:
        self._directory = store / "releases"

    def make(self) -> None:
        """Raises: OSError: there can be no notes."""
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def leave(self, digest: str) -> None:
        """Raises: OSError: it cannot be left; also where the store was never opened."""
        (self._directory / digest).touch(mode=0o600)

    def is_left(self, digest: str) -> bool:
        """Whether nobody has acted on it yet."""
        return (self._directory / digest).exists()

    def take(self) -> list[str]:
        """The digests of the notes; each is taken away first, else it would count again."""
        taken = []
        try:
            for note in self._directory.iterdir():
                if _DIGEST.match(note.name):
                    note.unlink()
                    taken.append(note.name)
        except OSError as error:
            log.debug("model store: %s: %s", self._directory, error)
        return taken
