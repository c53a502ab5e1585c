"""A training run says what it lacks before it begins, and learns from what it was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

if TYPE_CHECKING:
    from types import ModuleType

SCRIPTS = Path(__file__).parents[3] / "scripts"
ROWS = list(range(240, 720, 10))


@pytest.fixture
def material(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import lane_training.material as module

    return module


def drive(folder: Path, count: int, width: int = 640, height: int = 360) -> Path:
    """Labels of `count` images, with three straight lines each."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(count):
        cv2.imwrite(str(folder / f"{number}.png"), np.zeros((height, width, 3), np.uint8))
        rows = [y * height / 720 for y in ROWS]
        lanes = [[x * width / 1280 for _ in ROWS] for x in (300, 600, 900)]
        lines.append({"raw_file": f"{number}.png", "h_samples": rows, "lanes": lanes})
    labels = folder / "labels.jsonl"
    labels.write_text("\n".join(json.dumps(line) for line in lines))
    return labels


@pytest.mark.parametrize("size", [(640, 360), (1280, 720), (1920, 1080)])
def test_labels_of_any_size_become_lanes_of_the_training_frame(
    material: ModuleType, tmp_path: Path, size: tuple[int, int]
) -> None:
    labels = drive(tmp_path / "drive", 5, *size)
    made = material.Material(labels=(labels,))
    made.require()
    assert (len(made.training), len(made.evaluation)) == (4, 1)
    frame = material.TrainingImages(made.training)[0]
    assert frame.bgr.shape == (540, 960, 3)
    np.testing.assert_allclose(frame.x_px[:, 300], [225, 450, 675], atol=1e-2)
    (road, *_) = made.geometries()
    np.testing.assert_allclose(road.x_px[:, 300], [225, 450, 675], atol=1e-2)
    lanes, rows = made.evaluation[0].in_1280(made.evaluation[0].bgr().shape)
    np.testing.assert_allclose(lanes[:, 0], [300, 600, 900])
    np.testing.assert_allclose(rows, ROWS)


def test_other_labels_are_other_material(material: ModuleType, tmp_path: Path) -> None:
    one, two = drive(tmp_path / "one", 5), drive(tmp_path / "two", 6)
    made = material.Material(labels=(one,))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(one.read_bytes())
    assert made.identity() == material.Material(labels=(moved,)).identity()
    others = {
        material.identity_of(None),
        material.Material(labels=(two,)).identity(),
        material.Material(labels=(one, two)).identity(),
        material.Material(labels=(one,), held_out=0.5).identity(),
    }
    assert len(others) == 4
    assert made.identity() not in others
