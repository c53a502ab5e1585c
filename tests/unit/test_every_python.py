"""What one Python lets pass and another refuses is told on each of them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from types import MappingProxyType, ModuleType

import pytest

import edge_server

# They need what is on a board only, or are run by a Python of their own.
_ELSEWHERE = ("edge_server.backends.python.child", "edge_server.__main__")


@pytest.fixture
def modules() -> list[ModuleType]:
    """All of edge_server's, imported outside the test: what they import may look at the network."""
    imported = []
    for found in pkgutil.walk_packages(edge_server.__path__, "edge_server."):
        if found.name.startswith(_ELSEWHERE):
            continue
        try:
            imported.append(importlib.import_module(found.name))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("edge_server"):
                raise
    return imported


def test_no_dataclass_has_a_default_that_python_3_11_refuses(modules: list[ModuleType]) -> None:
    seen = 0
    for module in modules:
        for _, cls in inspect.getmembers(module, dataclasses.is_dataclass):
            for field in dataclasses.fields(cls):
                seen += 1
                # 3.11 asks whether a default can be hashed; of a mapping proxy 3.12 says yes.
                assert not isinstance(field.default, MappingProxyType), f"{cls}: {field.name}"
    assert seen > 100
