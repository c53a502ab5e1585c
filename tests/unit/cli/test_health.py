"""Health is what a daemon has been for some time without a restart, not what one look finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from edge_server.api.http.scrape import Scrape
from edge_server.cli.health import Look, Stability, _unmet, faults_of, wait_until_healthy
from edge_server.cli.main import run_command
from edge_server.errors import SettingsError
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

METRICS = """
edge_model_state{model="lanes",version="1",state="READY"} 1.0
edge_model_state{model="lanes",version="1",state="LOADING"} 0.0
edge_model_state{model="slow",version="1",state="READY"} 0.0
edge_model_state{model="slow",version="1",state="LOADING"} 1.0
edge_camera_up{camera="front"} 1.0
edge_camera_up{camera="rear"} 0.0
edge_camera_state{camera="rear",state="lost"} 1.0
edge_camera_last_lanes_age_seconds{camera="front"} 1.5
edge_mqtt_connected 0.0
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model:lanes", ""),
        ("model:slow", "is LOADING"),
        ("model:gone", "is not loaded"),
        ("camera:front", ""),
        ("camera:rear", "no frames arrive: lost"),
        ("camera:new", "the daemon runs without it; reload its settings"),
        ("lanes:front", ""),
        ("lanes:rear", "no valid lanes yet"),
        ("mqtt", "no connection to the broker"),
    ],
)
def test_each_requirement_is_met_or_has_a_reason(text: str, why: str) -> None:
    assert _unmet(text, Scrape(METRICS), 2.0) == why


def test_lanes_that_are_too_old_are_none() -> None:
    assert _unmet("lanes:front", Scrape(METRICS), 1.0) == "the newest valid lanes are 1.5 s old"


def test_a_look_that_finds_something_unmet_starts_the_time_anew() -> None:
    stability = Stability(10.0)
    assert not stability.is_met(Look({}, 0.0), 100.0)
    assert not stability.is_met(Look({"mqtt": "gone"}, 0.0), 109.0)
    assert not stability.is_met(Look({}, 0.0), 110.0)
    assert not stability.is_met(Look({}, 0.0), 119.9)
    assert stability.is_met(Look({}, 0.0), 120.0)
    assert stability.restarts == 0


def test_a_restart_between_two_looks_starts_the_time_anew() -> None:
    stability = Stability(10.0)
    assert not stability.is_met(Look({}, 50.0), 100.0)
    assert not stability.is_met(Look({}, 50.0), 109.0)
    assert not stability.is_met(Look({}, 109.5), 110.0)
    assert stability.restarts == 1
    assert not stability.is_met(Look({"daemon": "gone"}), 111.0)
    assert not stability.is_met(Look({}, 109.5), 112.0)
    assert stability.restarts == 1
    assert stability.is_met(Look({}, 109.5), 122.0)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_what_stays_healthy_for_all_of_the_wait_is_healthy(
    wait_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("edge_server.cli.health.look", lambda *_: Look({}, 0.0))
    given = settings(tmp_path)
    assert wait_until_healthy(given, (), Stability(wait_s), wait_s=wait_s)
    assert not wait_until_healthy(given, (), Stability(wait_s + 0.2), wait_s=wait_s)


def test_one_look_suffices_where_nothing_need_be_stable() -> None:
    assert Stability(0.0).is_met(Look({}, 0.0), 5.0)
    assert not Stability(0.0).is_met(Look({"daemon": "gone"}), 5.0)


def test_nothing_is_well_of_a_daemon_that_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edge_server.cli.health.look", lambda *_: Look({"daemon": "timed out"}))
    (tmp_path / "models/lanes").mkdir(parents=True)
    config = tmp_path / "config.toml"
    config.write_text(f'[repository]\npaths = ["{tmp_path}/models"]\n')
    assert run_command(["health", "--config", str(config), "--require", "model:lanes"]) == 69
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "daemon: timed out"
    assert "model:lanes: not known without the daemon" in lines
    assert not [line for line in lines if line.endswith(": ok")]


def settings(tmp_path: Path, **more: Any) -> Any:
    (tmp_path / "models/lanes").mkdir(parents=True, exist_ok=True)
    paths = {"repository": {"paths": [str(tmp_path / "models")]}}
    return read_settings(None, {**paths, **more})


def test_what_the_settings_do_not_have_is_an_error_with_what_they_have(tmp_path: Path) -> None:
    given = settings(tmp_path, cameras={"front": {"uri": "synthetic://road"}})
    required = ["model:lanes", "camera:front", "lanes:front"]
    assert faults_of(required, given) == []
    faults = faults_of(["model:lane", "camera:rear", "mqtt", "gpu:0", "model:"], given)
    assert faults == [
        "--require model:lane: no such model in the repository, which has lanes",
        "--require camera:rear: no such camera in the settings, which have front",
        "--require mqtt: the settings have no [mqtt]",
        "--require gpu:0: give model:NAME, camera:NAME, lanes:NAME or mqtt",
        "--require model:: give model:NAME, camera:NAME, lanes:NAME or mqtt",
    ]


def test_a_repository_that_is_not_mounted_yet_may_have_the_model(tmp_path: Path) -> None:
    given = settings(tmp_path, repository={"paths": [str(tmp_path / "later")]})
    assert faults_of(["model:any"], given) == []


def test_without_metrics_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="set enabled = true and a port"):
        faults_of([], settings(tmp_path, metrics={"enabled": False}))


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--require", "camera:rear"], 2),
        (["--wait", "5", "--stable", "6"], 2),
        (["--wait", "0"], 69),
    ],
)
def test_usage_is_told_at_once_from_a_daemon_that_is_missing(
    flags: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_daemon(host: str, port: int) -> Scrape:
        from edge_server.errors import Unavailable

        raise Unavailable(f"http://{host}:{port}/metrics: Connection refused")

    monkeypatch.setattr("edge_server.cli.health.scrape", no_daemon)
    (tmp_path / "config.toml").write_text("[metrics]\nport = 9\n")
    assert run_command(["health", "--config", str(tmp_path / "config.toml"), *flags]) == code
