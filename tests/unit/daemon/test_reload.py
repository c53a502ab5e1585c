"""A reload changes the cameras or nothing, and names what needs a restart."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from edge_server.daemon import reload
from edge_server.daemon.reload import SettingsReload, restart_needed
from edge_server.errors import SettingsError, Unavailable
from edge_server.settings import CameraSection, Grpc, Mqtt, Repository, Settings, Tls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FRONT = {"front": CameraSection(uri="synthetic://road")}


class Cameras:
    """Notes what it is changed to; fails with `error`."""

    def __init__(self) -> None:
        self.changed_to: list[Mapping[str, CameraSection]] = []
        self.error: Exception | None = None

    def change(self, sections: Mapping[str, CameraSection]) -> str:
        if self.error is not None:
            raise self.error
        self.changed_to.append(sections)
        return "added front"


class Requests(threading.Event):
    """Never waits."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


@pytest.fixture
def notified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(reload, "notify", lambda *assignments: said.extend(assignments))
    monkeypatch.setattr(reload, "_SETTLE_S", 0.0)
    return said


def reloading(
    cameras: Cameras, read: Callable[[], Settings], running: Settings | None = None
) -> tuple[SettingsReload, Requests]:
    requested = Requests()
    made = SettingsReload(running or Settings(), read, requested, cameras)  # type: ignore[arg-type]
    return made, requested


def test_nothing_is_read_without_a_request(notified: list[str]) -> None:
    cameras = Cameras()
    made, _ = reloading(cameras, lambda: pytest.fail("read"))
    made.tick(0.0)
    assert (cameras.changed_to, notified) == ([], [])


def test_the_cameras_become_those_of_the_new_settings(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cameras = Cameras()
    made, requested = reloading(cameras, lambda: Settings(cameras=FRONT))
    requested.set()
    with caplog.at_level(logging.INFO):
        made.tick(0.0)
        made.tick(0.0)
    assert cameras.changed_to == [FRONT]
    assert [record.message for record in caplog.records] == [
        "settings: reloaded; cameras: added front"
    ]
    assert notified[0] == "RELOADING=1"
    assert notified[1].startswith("MONOTONIC_USEC=")
    assert notified[2:] == ["READY=1"]


@pytest.mark.parametrize("fails", ["read", "change"])
def test_a_fault_is_logged_once_and_the_daemon_is_ready_as_before(
    fails: str, notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Settings:
        if fails == "read":
            raise SettingsError("config.toml: grpc.prot: unknown key")
        return Settings(cameras=FRONT)

    cameras = Cameras()
    cameras.error = Unavailable("cameras.front.model: no lanes")
    made, requested = reloading(cameras, read)
    requested.set()
    made.tick(0.0)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.message.startswith("settings: not reloaded, everything stays as it is: c")
    assert notified[-1] == "READY=1"


def test_a_reading_that_fails_in_an_unforeseen_way_changes_nothing_either(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> Settings:
        raise KeyError("unforeseen")

    cameras = Cameras()
    made, requested = reloading(cameras, read)
    requested.set()
    made.tick(0.0)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "not reloaded, everything stays as it is: 'unforeseen'" in record.message
    assert (cameras.changed_to, notified[-1]) == ([], "READY=1")


def test_a_request_during_a_reload_leads_to_one_more(notified: list[str]) -> None:
    cameras = Cameras()
    read = iter([{}, {}, FRONT, FRONT])

    def read_and_be_requested() -> Settings:
        sections = next(read)
        if not sections:
            requested.set()
            requested.set()
        return Settings(cameras=sections)

    made, requested = reloading(cameras, read_and_be_requested)
    requested.set()
    for _ in range(3):
        made.tick(0.0)
    assert cameras.changed_to == [{}, FRONT]
    assert notified.count("READY=1") == 2


def test_a_file_that_is_being_written_is_read_until_it_stays_the_same(notified: list[str]) -> None:
    cameras = Cameras()
    readings = iter([Settings(), SettingsError("not TOML"), *[Settings(cameras=FRONT)] * 2])

    def read() -> Settings:
        reading = next(readings)
        if isinstance(reading, SettingsError):
            raise reading
        return reading

    made, requested = reloading(cameras, read)
    requested.set()
    made.tick(0.0)
    assert cameras.changed_to == [FRONT]
    assert next(readings, None) is None
    assert notified


def test_settings_that_need_a_restart_are_named_in_one_line(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cameras = Cameras()
    changed = Settings(grpc=Grpc(port=9), mqtt=Mqtt(host="b"), cameras=FRONT)
    made, requested = reloading(cameras, lambda: changed)
    requested.set()
    made.tick(0.0)
    assert cameras.changed_to == [FRONT]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "settings: need a restart, and stay as they are: grpc.port, mqtt"
    ]
    assert notified[-1] == "READY=1"


def test_a_difference_is_named_by_its_own_key() -> None:
    running = Settings(repository=Repository(paths=("a",)), mqtt=Mqtt(host="b"))
    wanted = Settings(
        repository=Repository(paths=("a", "c")),
        grpc=Grpc(tls=Tls(certificate="x")),
        mqtt=Mqtt(host="b", port=9),
        cameras=FRONT,
    )
    assert restart_needed(running, wanted) == [
        "repository.paths",
        "grpc.tls.certificate",
        "mqtt.port",
    ]
    assert restart_needed(running, running) == []


def test_to_stop_ends_the_wait_and_reads_nothing(notified: list[str]) -> None:
    requested = threading.Event()
    cameras = Cameras()
    made = SettingsReload(Settings(), lambda: pytest.fail("read"), requested, cameras)  # type: ignore[arg-type]
    made.worker.start()
    made.stop(30.0)
    assert not made.worker.alive
    assert made.worker.failure is None
    assert notified == []


def test_a_reload_has_no_time_limit(notified: list[str]) -> None:
    limits_s: list[float] = []

    def read() -> Settings:
        limits_s.append(made.worker.limit_s)
        return Settings()

    made, requested = reloading(Cameras(), read)
    requested.set()
    made.tick(0.0)
    assert limits_s == [float("inf")] * 2
    assert made.worker.limit_s == made.worker.deadline_s
    assert notified
