"""What the tests of the store name alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.repository.scan import ModelTree
    from edge_server.repository.store import ModelStore, StagedModel

    Write = Callable[..., ModelTree]
    Open = Callable[..., ModelStore]


def die(store: ModelStore) -> None:
    """As the process would: the lock is let go, and nothing else is done."""
    assert store._locked is not None
    os.close(store._locked)
    store._locked = None


def text(staged: StagedModel | None) -> str:
    return "" if staged is None else (staged.directory / "a").read_text()
