"""Shared memory of one writer and one reader: blocks live as long as views on them, and tensors of
every type come out as they went in."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.backends.python.shared_memory import (
    MIB,
    ArenaReader,
    ArenaWriter,
    make_arena_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def arena(
    size_bytes: int = 4 * MIB, *, writable: bool = False
) -> Iterator[tuple[ArenaWriter, ArenaReader]]:
    fd = make_arena_file("test", size_bytes)
    writer, reader = ArenaWriter(fd), ArenaReader(fd, writable=writable)
    os.close(fd)
    yield writer, reader


def block(value: int, size_bytes: int = 1000) -> np.ndarray:
    return np.full(size_bytes, value, np.uint8)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_forked_process_drops_stays_in_use() -> None:
    with arena() as (writer, reader):
        views = [reader.view(writer.put(block(1)), 1000)]
        child = os.fork()
        if child == 0:
            views.clear()
            os._exit(0)
        os.waitpid(child, 0)
        writer.put(block(2))
        assert set(views[0].tolist()) == {1}
