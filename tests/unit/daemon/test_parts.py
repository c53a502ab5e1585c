"""The recorder as the settings have it, or why it cannot be; free space where the daemon writes."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from edge_server.board.board import Identity
from edge_server.board.facts import Heat, ThermalZone
from edge_server.board.watch import CLOCK_UNSYNCHRONIZED, DeviceReport
from edge_server.daemon.parts import KnownSurroundings, free_space, recorder_of
from edge_server.errors import Reason, SettingsError
from edge_server.pipeline.event_log import EventLog
from edge_server.settings import RecorderSection, Settings

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = Identity("truck-7", "1", "boot", "client")


def made(section: RecorderSection) -> object:
    return recorder_of(Settings(recorder=section), IDENTITY, EventLog(), lambda _: None)


def test_a_recorder_that_is_off_imports_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mcap", "edge_server.pipeline.recorder.recorder"):
        monkeypatch.setitem(sys.modules, name, None)
    assert made(RecorderSection()) is None


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("edge_server.pipeline.recorder")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "edge_server.cameras.mcap_file", raising=False)
    monkeypatch.setitem(sys.modules, "mcap", None)
    monkeypatch.setitem(sys.modules, "mcap.writer", None)
    monkeypatch.setitem(sys.modules, "mcap.exceptions", None)
    with pytest.raises(SettingsError, match=r"recorder\.mode: the library mcap is missing; "):
        made(RecorderSection(mode="events"))


def test_a_camera_that_is_not_in_the_settings_is_named() -> None:
    with pytest.raises(SettingsError, match=r"recorder\.cameras: there is no camera 'front'"):
        made(RecorderSection(mode="events", cameras=("front",)))


def test_a_directory_that_is_not_made_yet_has_the_free_space_of_its_parent(tmp_path: Path) -> None:
    later = tmp_path / "edge_server" / "store"
    numbers = os.statvfs(tmp_path)
    total_bytes = numbers.f_blocks * numbers.f_frsize
    assert 0 < free_space([later])[str(later)] <= total_bytes


class Known:
    """A vehicle and a board as a test has them, and their clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.vehicle: Any = SimpleNamespace(at=lambda: self.state)
        self.state: Any = None
        self.board: Any = SimpleNamespace(latest=DeviceReport())
        self.surroundings = KnownSurroundings(self.vehicle, self.board)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def drives(self, *speeds: float | None, each_s: float = 1.0) -> float | None:
        """Look once at each of these speeds, None for a vehicle that says none."""
        for speed in speeds:
            self.now_s += each_s
            self.state = None if speed is None else SimpleNamespace(speed_mps=speed)
            found = self.surroundings.look().parked_s
        return found


def test_a_vehicle_is_parked_as_long_as_it_is_seen_to_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Known(monkeypatch)
    assert known.drives(None) is None
    assert known.drives(0.0) == 0.0
    assert known.drives(0.05, -0.05, 0.0) == 3.0
    assert known.drives(3.0) == 0.0
    assert known.drives(0.0, 0.0) == 1.0
    # What happened without a look, or without a speed, is not known.
    assert known.drives(0.0, each_s=61.0) == 0.0
    assert known.drives(0.0, None, 0.0) == 0.0


def test_what_the_board_does_not_know_is_not_known_to_a_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Known(monkeypatch)
    found = known.surroundings.look()
    assert found.now is not None
    assert found.celsius is None
    heat = Heat((ThermalZone("cpu", 50.0), ThermalZone("gpu", 61.5)))
    known.board.latest = DeviceReport(
        (Reason(CLOCK_UNSYNCHRONIZED),), facts=cast("Any", SimpleNamespace(heat=heat))
    )
    found = known.surroundings.look()
    assert found.now is None
    assert found.celsius == 61.5
