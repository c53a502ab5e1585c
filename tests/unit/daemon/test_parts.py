"""The recorder as the settings have it, or why it cannot be; free space where the daemon writes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from edge_server.board.identity import Identity
from edge_server.daemon.parts import free_space, recorder_of
from edge_server.errors import SettingsError
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
