"""A start that was interrupted, or a model added while the daemon was off, keeps no lanes away."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.polling_server import Server

MODELS = Path(__file__).parents[2] / "models"
ROAD = "synthetic://road?seed=7&fps=4"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    shutil.copytree(MODELS, place)
    return place


def wait_for_lanes(server: Server, camera: str) -> None:
    name = f'edge_camera_lanes_ok{{camera="{camera}"}}'
    wait_until(lambda: server.metric(name) == 1, otherwise=lambda: server.log)


def all_kept(server: Server, *models: str) -> bool:
    return all(f"model {name}: last known good" in server.log for name in models)


# What the kill between two commits leaves: some copies, and not all that the camera needs.
@pytest.mark.parametrize("late", ["lane_detection", "laneDetect_model"])
def test_a_first_start_that_was_killed_before_all_copies_were_kept_goes_on(
    late: str, serve: Callable[..., Server], repository: Path, tmp_path: Path
) -> None:
    (repository / late).rename(tmp_path / late)
    kept = [path.name for path in repository.iterdir() if path.name != "lane_detection"]
    first = serve("--exit-on-error=false")
    wait_until(lambda: all_kept(first, *kept), otherwise=lambda: first.log)
    first.process.popen.kill()
    first.process.close()
    (tmp_path / late).rename(repository / late)
    again = serve(f"--camera=front={ROAD}")
    wait_for_lanes(again, "front")
    again.process.wait_for_log("camera front: waits for its model, lane_detection")


def test_a_camera_added_with_its_model_while_the_daemon_is_off_keeps_no_other_waiting(
    serve: Callable[..., Server], repository: Path, tmp_path: Path
) -> None:
    first = serve(f"--camera=front={ROAD}")
    wait_for_lanes(first, "front")
    wait_until(lambda: all_kept(first, "lane_detection"), otherwise=lambda: first.log)
    assert first.process.terminate() == 0
    shutil.copytree(repository / "lane_detection", repository / "rear_lanes")
    config = repository / "rear_lanes" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "lane_detection"', 'name: "rear_lanes"'))
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[cameras.front]\nuri = "{ROAD}"\n[cameras.rear]\nuri = "{ROAD}"\nmodel = "rear_lanes"\n'
    )
    again = serve(f"--config={settings}")
    wait_for_lanes(again, "front")
    wait_for_lanes(again, "rear")
    again.process.wait_for_log("camera rear: waits for its model, rear_lanes")
    assert "camera front: waits" not in again.log
