"""Loads that clients and models request: checked first, and bounded in number."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.waiting import TIMEOUT_S

from edge_server.errors import InvalidRequest, Unavailable
from edge_server.inference.data_plane import PLAIN_LOAD, BoundedControl, LiveModels, LoadOptions
from edge_server.inference.registry import ModelRegistry

if TYPE_CHECKING:
    from edge_server.inference.registry import ModelEntry


class RecordingControl:
    """A ModelControl that records its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def load(self, name: str, options: LoadOptions = PLAIN_LOAD) -> None:
        self.calls.append((name, options.config, dict(options.files), options.within))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.calls.append((name, unload_dependents))

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return []


def controlled() -> tuple[LiveModels, RecordingControl]:
    models, control = LiveModels(ModelRegistry()), RecordingControl()
    models.control = control
    return models, control


def test_files_are_named_as_the_protocol_names_them() -> None:
    models, control = controlled()
    models.load("b", config="{}", files={"file:1/model.py": b"x"}, within="a")
    models.unload("b", unload_dependents=True)
    assert control.calls == [("b", "{}", {"1/model.py": b"x"}, "a"), ("b", True)]


def test_other_names_are_refused_with_the_contracts_text() -> None:
    models, control = controlled()
    with pytest.raises(InvalidRequest) as caught:
        models.load("b", config="{}", files={"1/model.py": b"x"}, within="a")
    assert str(caught.value) == "unrecognized load parameter '1/model.py'."
    assert control.calls == []


def test_without_control_nothing_is_loaded_or_unloaded() -> None:
    models = LiveModels(ModelRegistry())
    text = "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(Unavailable, match=text):
        models.load("b", config=None, files={}, within="a")
    with pytest.raises(Unavailable, match=text):
        models.unload("b", unload_dependents=False)


class BlockedControl:
    """A ModelControl that loads only once it may."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.begun = threading.Semaphore(0)
        self.done = threading.Event()

    def load(self, name: str, options: LoadOptions = PLAIN_LOAD) -> None:
        self.begun.release()
        assert self.done.wait(TIMEOUT_S)
        self.calls.append((name, options.config, dict(options.files), options.within))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.calls.append((name, unload_dependents))

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return []


def test_a_load_too_many_is_refused_at_once_and_unloads_never_are() -> None:
    inner = BlockedControl()
    control = BoundedControl(inner, loads=2)
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(control.load, name) for name in ("a", "b")]
        for _ in loads:
            assert inner.begun.acquire(timeout=TIMEOUT_S)
        with pytest.raises(Unavailable, match="2 model loads are under way already; request 'c'"):
            control.load("c")
        control.unload("d")
        inner.done.set()
        for each in loads:
            each.result(TIMEOUT_S)
    control.load("c", LoadOptions(within="a"))
    assert ("c", None, {}, "a") in inner.calls
    assert ("d", False) in inner.calls
