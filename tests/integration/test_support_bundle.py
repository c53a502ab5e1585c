"""The verb on this machine, with the daemon dead and alive, and secrets wherever they can be."""

from __future__ import annotations

import json
import os
import tarfile
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from support.verb import run_verb
from unit.cli.test_support_bundle import KEY, SECRETS, forms, leaks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.daemon_process import Process

MODELS = __file__.rpartition("/tests/")[0] + "/models"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings with secrets in every place, and a log that quotes each in every form."""
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "password").write_text(SECRETS["broker"])
    (tmp_path / "login").write_text(f"viewer:{SECRETS['credentials']}")
    (tmp_path / "log").write_text(
        "".join(
            f"quoted {each}\n" for secret in SECRETS.values() for each in forms(secret).values()
        )
        + KEY
    )
    path = tmp_path / "config.toml"
    path.write_text(
        f"""
        [device]
        id = "truck-17"
        [repository]
        paths = ["{MODELS}"]
        [metrics]
        port = METRICS
        [http]
        port = 0
        [mqtt]
        host = "127.0.0.1"
        port = 1
        username = "{SECRETS["user"]}"
        password_file = "{tmp_path}/password"
        [[grpc.restricted]]
        protocols = ["trace"]
        header = "x"
        value = "{SECRETS["header"]}"
        [grpc.tls]
        key = "{tmp_path}/key"
        [cameras.front]
        uri = "rtsp://viewer:{quote(SECRETS["camera"], safe="")}@127.0.0.1:1/s"
        [cameras.rear]
        uri = "rtsp://127.0.0.1:2/s"
        credentials_file = "{tmp_path}/login"
        [log]
        file = "{tmp_path}/log"
        """
    )
    return path


def contents(config: Path, *arguments: str) -> dict[str, str]:
    """The files of a bundle."""
    path = config.with_name("bundle.tar.gz")
    environment = {**os.environ, "XDG_STATE_HOME": str(config.parent / "state")}
    words = ("support-bundle", f"--config={config}", "-o", path, *arguments)
    done = run_verb(*words, env=environment)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        files = {each.name.rpartition("/")[2]: archive.extractfile(each) for each in archive}
        found = {name: file.read().decode() for name, file in files.items() if file is not None}
    for name, text in found.items():
        for which, secret in SECRETS.items():
            assert not leaks(text, secret), (name, which)
    assert "log.txt" in found
    return found


def test_a_bundle_of_a_dead_daemon_has_no_secret(config: Path) -> None:
    config.write_text(config.read_text().replace("METRICS", "1"))
    found = contents(config)
    manifest = json.loads(found["manifest.json"])
    assert "does the daemon run" in manifest["missing"]["metrics.txt"]
    assert json.loads(found["settings.json"])["device"]["id"] == "truck-17"
    assert json.loads(found["doctor.json"])["checks"]
    assert json.loads(found["versions.json"])["packages"]["grpcio"]
    assert "truck-17" not in "".join(contents(config, "--anonymous").values())


def test_a_bundle_of_a_daemon_that_runs_has_its_metrics(
    config: Path, start: Callable[..., Process]
) -> None:
    text = config.read_text()
    config.write_text(text.replace("METRICS", "0"))
    process = start("--config", str(config))
    process.wait_for_log("camera front")
    config.write_text(text.replace("METRICS", str(process.metrics_port)))
    found = contents(config)
    assert "edge_board_condition" in found["metrics.txt"]
    assert "camera front" in found["log.txt"]


def test_settings_with_a_fault_are_no_reason_for_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[mqtt\npassword = 'open sesame'")
    done = run_verb("support-bundle", f"--config={path}", "-o", tmp_path / "b.tar.gz")
    assert done.returncode == 0, done.stderr
    assert "without settings.json" in done.stdout
    assert "sesame" not in done.stdout
