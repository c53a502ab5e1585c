"""A store that the next process opens, and models to put into it and to deliver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.deliveries import make_model  # noqa: F401 - a fixture
from unit.repository.stores import die

from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from unit.repository.stores import Open, Write

    from edge_server.repository.scan import ModelTree


@pytest.fixture
def write(repository: Path) -> Write:
    """Writes files (path → content; None is a directory) of a model; what is there then."""

    def write(files: dict[str, bytes | None], name: str = "m") -> ModelTree:
        for path, content in files.items():
            place = repository / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                place.mkdir()
            else:
                place.write_bytes(content)
        return scan_model(repository, name)

    return write


@pytest.fixture
def reopened(tmp_path: Path) -> Iterator[Open]:
    """Opens the store anew, as the next process on the same start of the board would."""
    last: list[ModelStore] = []

    def reopened(*, died: bool = False, **options: object) -> ModelStore:
        while last:
            store = last.pop()
            die(store) if died else store.close()
        last.append(ModelStore(tmp_path / "store", **{"boot": "1", **options}))
        return last[-1]

    yield reopened
    while last:
        last.pop().close()
