"""Shared memory of one writer and one reader: blocks live as long as views on them, and tensors of
every type come out as they went in."""

from __future__ import annotations

import os

import pytest
from unit.backends.python.test_shared_memory import arena, block


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
