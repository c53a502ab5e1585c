"""A daemon's verdicts, as a test wants them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.repository.verdicts import GOOD, ON_TRIAL, Verdict, VerdictFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Verdicts:
    """Writes each verdict as the daemon of `store` does."""

    def __init__(self, store: Path, repositories: Sequence[Path]) -> None:
        self._store = store
        self._models: dict[str, Verdict] = {}
        self._file = VerdictFile(store, repositories)

    def tell(self, name: str, outcome: str, digest: str = "", reason: str = "") -> None:
        self._change(name, outcome=outcome, digest=digest, reason=reason)

    def serves(self, name: str, digest: str, *, on_trial: bool) -> None:
        outcome = ON_TRIAL if on_trial else GOOD
        self._change(name, outcome=outcome, digest=digest, reason="", serves=digest)

    def is_good(self, name: str, digest: str, directory: Path) -> None:
        self.serves(name, digest, on_trial=False)
        self._change(name, last_good=digest, copy=str(directory.relative_to(self._store)))

    def compared(self, name: str, found: str, served: str) -> None:
        self._change(name, candidate=found, candidate_of=served)

    def gone(self, name: str) -> None:
        del self._models[name]
        self.write_again()

    def write_again(self) -> None:
        self._file.write(lambda: self._models)

    def _change(self, name: str, **fields: str) -> None:
        before = self._models.get(name, Verdict())
        self._models[name] = before._replace(told_ns=time.monotonic_ns(), **fields)
        self.write_again()
