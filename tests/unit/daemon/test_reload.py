"""A reload changes the cameras or nothing, and names what needs a restart."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from edge_server.daemon import reload
from edge_server.daemon.daemon import Daemon
from edge_server.daemon.reload import LivePart, SettingsReload, differences, shown_settings
from edge_server.errors import SettingsError, Unavailable
from edge_server.settings import (
    CameraSection,
    Grpc,
    Http,
    LogSection,
    Metrics,
    Mqtt,
    Power,
    Repository,
    Restriction,
    Serving,
    Settings,
    Tls,
)
from edge_server.settings.sections import POWER, RESTART, NetworkSection, Section, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

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
    parts = {"cameras": LivePart(lambda _, wanted: cameras.change(wanted.cameras))}
    made = SettingsReload(running or Settings(), read, requested, parts)
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


def test_a_check_that_fails_in_an_unforeseen_way_changes_nothing_either(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def check(_: Settings) -> None:
        raise ValueError("embedded null byte")

    cameras = Cameras()
    parts = {
        "cameras": LivePart(lambda _, wanted: cameras.change(wanted.cameras)),
        "broker": LivePart(lambda *_: "", check),
    }
    requested = Requests()
    made = SettingsReload(Settings(), lambda: Settings(cameras=FRONT), requested, parts)
    requested.set()
    made.tick(0.0)
    assert "everything stays as it is: embedded null byte" in caplog.text
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


def test_each_setting_that_needs_a_restart_is_named_with_both_values(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cameras = Cameras()
    changed = Settings(grpc=Grpc(port=9), serving=Serving(name="x"), cameras=FRONT)
    readings = [changed] * 4 + [Settings()] * 2
    made, requested = reloading(cameras, lambda: readings.pop(0))
    for waiting in (("serving.name", "grpc.port"),) * 2 + ((),):
        caplog.clear()
        requested.set()
        made.tick(0.0)
        assert made.restart_needed == waiting
        assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
            'settings: serving.name: "triton" -> "x": restart needed, "triton" stays until then',
            "settings: grpc.port: 8001 -> 9: restart needed, 8001 stays until then",
        ][: len(waiting)]
    assert cameras.changed_to == [FRONT, FRONT, {}]
    assert notified[-1] == "READY=1"


def test_what_another_unit_applies_names_that_unit_and_no_restart(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made, requested = reloading(Cameras(), lambda: Settings(power=Power(mode="MAXN")))
    requested.set()
    made.tick(0.0)
    assert (
        'settings: power.mode: null -> "MAXN": systemctl restart edge-server-power.service applies '
        "it" in caplog.text
    )
    assert made.restart_needed == ()
    assert notified


def test_the_summary_names_what_was_applied(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    running = Settings(cameras=FRONT)
    wanted = Settings(log=LogSection(verbose=1), grpc=Grpc(max_pending_bytes=2**20), cameras=FRONT)
    asked: list[tuple[Settings, Settings]] = []

    def change(before: Settings, wanted: Settings) -> str:
        asked.append((before, wanted))
        return ""

    requested = Requests()
    made = SettingsReload(running, lambda: wanted, requested, {"log": LivePart(change)})
    for _ in range(2):
        requested.set()
        with caplog.at_level(logging.INFO):
            made.tick(0.0)
    assert asked == [(running, wanted), (wanted, wanted)]
    assert [record.message for record in caplog.records] == [
        "settings: reloaded; grpc.max_pending_bytes: 201326592 -> 1048576; log.verbose: 0 -> 1",
        "settings: reloaded; nothing differs",
    ]
    assert notified


def test_what_waits_for_a_restart_is_not_said_to_be_no_difference(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Settings(serving=Serving(name="other"))
    requested = Requests()
    made = SettingsReload(Settings(), lambda: wanted, requested, {})
    requested.set()
    with caplog.at_level(logging.INFO):
        made.tick(0.0)
    first, second = (record.message for record in caplog.records)
    assert first == "settings: reloaded; nothing changes yet"
    assert second.startswith("settings: serving.name: ")
    assert "restart needed" in second
    assert notified


def test_a_part_that_refuses_the_settings_keeps_every_part_as_it_is(
    notified: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Settings) -> None:
        if faults:
            raise SettingsError(faults[0])

    faults = ["mqtt.password_file: p: cannot be read: No such file or directory"]
    cameras = Cameras()
    parts = {
        "cameras": LivePart(lambda _, wanted: cameras.change(wanted.cameras)),
        "broker": LivePart(lambda *_: "", refuse),
    }
    requested = Requests()
    made = SettingsReload(Settings(), lambda: Settings(cameras=FRONT), requested, parts)
    requested.set()
    made.tick(0.0)
    assert cameras.changed_to == []
    assert made.fault == faults[0]
    assert "everything stays as it is: mqtt.password_file: p" in caplog.text

    faults.clear()
    requested.set()
    made.tick(0.0)
    assert (cameras.changed_to, made.fault) == ([FRONT], "")
    assert notified[-1] == "READY=1"


def parts(section: type[Section]) -> Iterator[str]:
    """The parts that the settings of `section` name, below it too."""
    for field in msgspec.structs.fields(section):
        if part := part_of(field.type):
            yield part
        if isinstance(field.default, Section):
            yield from parts(type(field.default))


def test_every_part_that_a_setting_names_is_one_of_the_daemon(tmp_path: Path) -> None:
    metrics, grpc, http = Metrics(enabled=False), Grpc(enabled=False), Http(enabled=False)
    repository = Repository(paths=(str(tmp_path),), store=str(tmp_path / "store"))
    daemon = Daemon(
        Settings(metrics=metrics, grpc=grpc, http=http, repository=repository),
        read_settings=Settings,
        reload_requested=Requests(),
    )
    assert daemon._reload is not None
    assert daemon._reload._parts.keys() | {RESTART, POWER} == set(parts(Settings))


def test_a_difference_is_named_by_its_own_key() -> None:
    running = Settings(repository=Repository(paths=("a",)), mqtt=Mqtt(host="b"))
    wanted = Settings(
        repository=Repository(paths=("a", "c")),
        grpc=Grpc(tls=Tls(certificate="x"), message_timeout_ms=9),
        mqtt=Mqtt(host="b", port=9),
        cameras=FRONT,
    )
    assert [(each.name, each.part) for each in differences(running, wanted)] == [
        ("repository.paths", RESTART),
        ("grpc.tls.certificate", "grpc"),
        ("grpc.message_timeout_ms", "grpc"),
        ("mqtt", "broker"),
        ("cameras", "cameras"),
    ]
    assert differences(running, running) == []


def test_certificates_wait_for_the_restart_that_turns_encryption_on() -> None:
    on = Grpc(tls=Tls(enabled=True, certificate="c", key="k"))
    found = differences(Settings(), Settings(grpc=on))
    assert {each.name for each in found} == {
        "grpc.tls.enabled",
        "grpc.tls.certificate",
        "grpc.tls.key",
    }
    assert {each.part for each in found} == {RESTART}


def test_no_difference_shows_a_secret() -> None:
    def restricted(value: str) -> Grpc:
        return Grpc(restricted=(Restriction(("health",), "key", value),))

    login = "rtsp://me:geheim@camera/road"
    for running, wanted in (
        (Settings(grpc=restricted("geheim")), Settings(grpc=restricted("geheim2"))),
        (Settings(cameras={"a": CameraSection(uri=login)}), Settings()),
        (Settings(repository=Repository(store=login)), Settings()),
    ):
        (found,) = differences(running, wanted)
        assert "geheim" not in f"{found.old} {found.new}"
        assert found.old != "[]"


def test_to_stop_ends_the_wait_and_reads_nothing(notified: list[str]) -> None:
    requested = threading.Event()
    made = SettingsReload(Settings(), lambda: pytest.fail("read"), requested, {})
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


def test_shown_settings_are_every_setting_with_its_value_and_no_secret() -> None:
    restricted = (Restriction(("logging",), "key", "header-secret"),)
    settings = Settings(
        grpc=Grpc(port=7000, restricted=restricted),
        mqtt=Mqtt("localhost", username="a-token", password_file="/etc/edge/password"),  # noqa: S106 - a path
        cameras={
            "front": CameraSection(uri="rtsp://admin:camera-secret@10.0.0.9/a?pwd=other-secret")
        },
    )
    shown = {name: (value, default) for name, value, default in shown_settings(settings)}
    assert shown["grpc.port"] == ("7000", False)
    assert shown["http.port"] == ("8000", True)
    assert shown["mqtt.password_file"] == ('"/etc/edge/password"', False)
    assert shown["mqtt.username"] == ('"***"', False)
    assert shown["mqtt.port"][1]
    assert shown["cameras.front.uri"][0].startswith('"rtsp://***@10.0.0.9/a')
    assert not shown["cameras.front.uri"][1]
    assert shown["cameras.front.max_age_ms"][1]
    text = str(shown)
    for secret in ("header-secret", "a-token", "camera-secret", "other-secret"):
        assert secret not in text


def test_a_network_s_settings_are_shown_below_its_camera() -> None:
    networks = {"vehicles": NetworkSection(model="vehicles")}
    camera = CameraSection(uri="synthetic://road", networks=networks)
    names = [each.name for each in shown_settings(Settings(cameras={"rear": camera}))]
    assert "cameras.rear.networks.vehicles.model" in names
    assert len(names) == len(set(names))
