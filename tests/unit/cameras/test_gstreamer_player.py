"""The stop of a pipeline, of one whose driver hangs too."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from edge_server.cameras import gstreamer_player

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeBus:
    def __init__(self) -> None:
        self.flushed = threading.Event()

    def set_flushing(self, flushing: bool) -> None:
        assert flushing
        self.flushed.set()


class Sockets:
    """The connections of a camera; where `wakes` is set, the pipeline waits for one of them."""

    def __init__(self, wakes: threading.Event | None = None) -> None:
        self.wakes = wakes

    def shut_down(self) -> None:
        if self.wakes is not None:
            self.wakes.set()


class FakePipeline:
    """A pipeline whose driver returns from its stop when `returns` is set."""

    def __init__(self) -> None:
        self.returns = threading.Event()
        self.states: list[str] = []

    def set_state(self, state: str) -> None:
        self.states.append(state)
        self.returns.wait(30)


@pytest.fixture
def pipeline() -> Iterator[FakePipeline]:
    made = FakePipeline()
    yield made
    made.returns.set()


def test_a_stop_ends_the_pipeline_and_undoes_what_holds_it(pipeline: FakePipeline) -> None:
    pipeline.returns.set()
    bus, undone = FakeBus(), []
    gstreamer_player._stop(pipeline, "null", bus, [lambda: undone.append("probe")], Sockets())
    assert pipeline.states == ["null"]
    assert bus.flushed.is_set()
    assert undone == ["probe"]


def test_a_driver_that_hangs_in_its_stop_keeps_nobody(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gstreamer_player, "_QUICK_STOP_S", 0.01)
    monkeypatch.setattr(gstreamer_player, "_STOP_S", 0.01)
    bus = FakeBus()
    gstreamer_player._stop(pipeline, "null", bus, [], Sockets())
    assert "does not stop; its driver hangs" in caplog.text
    assert not bus.flushed.is_set()
    # The thread goes on, and cleans up when the driver returns after all.
    pipeline.returns.set()
    assert bus.flushed.wait(30)


def test_a_message_without_end_is_left_by_the_end_of_its_connection(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gstreamer_player, "_QUICK_STOP_S", 0.01)
    bus = FakeBus()
    gstreamer_player._stop(pipeline, "null", bus, [], Sockets(pipeline.returns), wait=True)
    assert bus.flushed.is_set()
