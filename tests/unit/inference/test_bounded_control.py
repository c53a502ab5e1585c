"""So many loads are waited for at once, and no more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import Unavailable
from edge_server.inference.bounded_control import BoundedControl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.snapshot import ModelEntry


class Waits:
    """A ModelControl that loads until it is told that it is done."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.begun = threading.Semaphore(0)
        self.done = threading.Event()

    def load(
        self,
        name: str,
        *,
        config: str | None,
        files: Mapping[str, bytes],
        within: str,
        cancellation: object,
    ) -> None:
        self.begun.release()
        assert self.done.wait(10.0)
        self.asked.append((name, config, dict(files), within))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.asked.append((name, unload_dependents))

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return []


def test_a_load_too_many_is_refused_at_once_and_unloads_never_are() -> None:
    inner = Waits()
    control = BoundedControl(inner, loads=2)
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(control.load, name) for name in ("a", "b")]
        for _ in loads:
            assert inner.begun.acquire(timeout=10.0)
        with pytest.raises(Unavailable, match="2 model loads are under way already; ask for 'c'"):
            control.load("c")
        control.unload("d")
        inner.done.set()
        for each in loads:
            each.result(10.0)
    control.load("c", within="a")
    assert ("c", None, {}, "a") in inner.asked
    assert ("d", False) in inner.asked
