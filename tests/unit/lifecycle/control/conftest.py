"""A repository under model control."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.lifecycle.control.world import TIMEOUT_S, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def world(repository: Path) -> Iterator[World]:
    made = World(repository).start()
    yield made
    made.control.close(TIMEOUT_S)
