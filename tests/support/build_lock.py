"""The lock of plan builds, which is the machine's."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def own_build_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of plan builds is the machine's: another test session may hold it."""
    name = f"\0edge-server-test-{os.getpid()}"
    monkeypatch.setattr("edge_server.backends.tensorrt.plan_cache.LOCK_NAME", name)
