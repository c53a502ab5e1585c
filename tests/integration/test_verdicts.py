"""A push reports the daemon's verdict, and a rollback brings back what was good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.adding_models import build, network
from support.waiting import wait_until

from .delivery.verbs import models

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.polling_server import Server

TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    build(place / "m", network(1))
    build(place / "other", network(100))
    return place


def listed(repository: Path, store: Path) -> dict[str, dict[str, str]]:
    done = models("list", repository, "--store", store, "--json")
    assert done.returncode == 0, done.stderr
    return {row["name"]: row["daemon"] for row in json.loads(done.stdout)}


def test_a_push_reports_the_verdict_of_the_daemon(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server, store, made = serve(), tmp_path / "store", tmp_path / "made" / "m"
    there = ("--to", server.repository, "--store", store)
    good = models("push", build(made, network(2)), *there)
    assert good.returncode == 0, good.stderr
    assert "serves, and is watched beside what served before" in good.stdout
    assert server.answer() == 2

    for data, says in (
        (network(9)[:60], "model.onnx"),
        (network(float("nan")), "no finite element"),
    ):
        bad = models("push", build(made, data), *there)
        assert bad.returncode == 1, bad.stdout
        assert "m: refused: " in bad.stderr
        assert says in bad.stderr
        assert server.answer() == 2
        again = models("push", made, *there)
        assert (again.returncode, "m: refused: " in again.stderr) == (1, True), again.stderr
    daemon = listed(server.repository, store)["m"]
    assert daemon["outcome"] == "refused"
    assert "no finite element" in daemon["reason"]
    text = models("list", server.repository, "--store", store).stdout
    assert "DAEMON" in text
    assert f"m: {daemon['serves'][:12]} serves" in text

    assert models("push", made, *there, "--no-wait").returncode == 0
    back = models("rollback", "m", *there)
    assert back.returncode == 1  # what was there before the NaN is the file of 60 bytes
    last_good = models("rollback", "m", *there, "--to-last-good")
    assert last_good.returncode == 0, last_good.stderr
    assert "is what was last found good" in last_good.stdout
    # Of 2 nobody asked often enough.
    assert server.wait_for(1) <= {2}
    assert listed(server.repository, store)["m"]["outcome"] in ("good", "on trial")


def test_a_push_can_wait_until_the_probation_is_over(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[repository]\nprobation_requests = 20\nprobation_s = 0.5\n")
    server, store, made = serve(f"--config={config}"), tmp_path / "store", tmp_path / "made" / "m"
    command = ["push", build(made, network(3)), "--to", server.repository, "--until-passed"]
    push = subprocess.Popen(
        [sys.executable, "-m", "edge_server", "models", *map(str, command), f"--store={store}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: server.answer() and push.poll() is not None, TIMEOUT_S)
    said, errors = push.communicate()
    assert push.returncode == 0, errors
    assert said.endswith(" serves\n")
    daemon = listed(server.repository, store)["m"]
    assert daemon["outcome"] == "good"
    assert daemon["last_good"] == daemon["serves"]


def test_a_push_that_requires_a_daemon_fails_without_one(
    serve: Callable[..., Server], repository: Path, tmp_path: Path
) -> None:
    made, store = build(tmp_path / "made" / "m", network(2)), tmp_path / "store"
    there = ("--to", repository, "--store", store)
    for _ in range(2):
        assert models("push", made, *there).returncode == 0
        insists = models("push", made, *there, "--wait")
        assert insists.returncode == 69
        assert "no daemon that runs there follows" in insists.stderr
        # Nor does one that ended say anything.
        server = serve()
        assert server.process.terminate() == 0


def test_over_ssh_the_verdict_of_the_daemon_there_is_reported(
    serve: Callable[..., Server], repository: Path, tmp_path: Path
) -> None:
    # Runs the command as the login shell of the host would, which has edge-server in its PATH.
    ssh = tmp_path / "ssh"
    path = Path(sys.executable).parent
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\n'
        f'PATH={path}:$PATH exec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    server, store, made = serve(), tmp_path / "store", tmp_path / "made" / "m"
    there = ("--to", f"host:{repository}", "--ssh", ssh, "--store", store)
    good = models("push", build(made, network(2)), *there, "--wait")
    assert good.returncode == 0, good.stderr
    assert server.answer() == 2
    bad = models("push", build(made, network(9)[:60]), *there)
    assert bad.returncode == 1
    assert "m: refused: " in bad.stderr
    table = models("list", f"host:{repository}", "--ssh", ssh, "--store", store).stdout
    assert "refused" in table
    back = models("rollback", "m", *there, "--to-last-good")
    assert back.returncode == 0, back.stderr
    server.wait_for(1)
    away = models("rollback", "m", *there[:-1], tmp_path / "nowhere", "--to-last-good")
    assert away.returncode == 1
    assert "no daemon is known that follows it; name its store with --store" in away.stderr


def test_a_promoted_candidate_goes_the_way_of_a_push(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server, store = serve(), tmp_path / "store"
    there = ("promote", "other", "--to", server.repository, "--store", store)
    refused = models(*there)
    assert refused.returncode == 1
    assert "other: no good verdict: the daemon has compared nothing of it" in refused.stderr
    assert server.answer() == 1
    done = models(*there, "--as", "m", "--force")
    assert done.returncode == 0, done.stderr
    assert "serves, and is watched beside what served before" in done.stdout
    assert (server.answer(), server.answer("other")) == (100, 100)
    assert models("rollback", "m", "--to", server.repository, "--store", store).returncode == 0
    server.wait_for(1)
