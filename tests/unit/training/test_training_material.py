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

TRAINING = Path(__file__).parents[3] / "training"
ROWS = list(range(240, 720, 10))


@pytest.fixture
def material(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TRAINING))
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
    made = material.Material(own=(material.OwnLabels(labels),))
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
    own = material.OwnLabels
    one, two = drive(tmp_path / "one", 5), drive(tmp_path / "two", 6)
    made = material.Material(own=(own(one),))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(one.read_bytes())
    assert made.identity() == material.Material(own=(own(moved),)).identity()
    others = {
        material.identity_of(None),
        material.Material(own=(own(two),)).identity(),
        material.Material(own=(own(one), own(two))).identity(),
        material.Material(own=(own(one, weight=2.0),)).identity(),
        material.Material(own=(own(one),), held_out=0.5).identity(),
        material.Material(own=(own(one),), left_out=frozenset({"labels.jsonl"})).identity(),
    }
    assert len(others) == 6
    assert made.identity() not in others


def labelled(material: ModuleType, drive_name: str, number: int, **more: object) -> object:
    path = Path("clips", drive_name, str(number), "20.jpg")
    return material.Labelled(path, [], [], drive_name, order=(number, 20), frame=number, **more)


def test_the_end_of_each_drive_is_held_out_with_two_seconds_between(material: ModuleType) -> None:
    """The lines of a label file are not in the drive's order."""
    numbers = [100, 0, 820, 20, 400, 790, 300, 200, 900, 980]
    images = [labelled(material, name, n) for name in ("a", "b") for n in numbers]
    machine = [labelled(material, "a", 990, human=False)]
    training, evaluation = material.split([*images, *machine], 0.2)
    for name in ("a", "b"):
        frames = [
            [e.frame for e in part if e.source == name and e.human]
            for part in (training, evaluation)
        ]
        assert frames == [[0, 20, 100, 200, 300, 400, 790, 820], [900, 980]]
    assert machine[0] in training
    near = [labelled(material, "a", n) for n in (0, 10, 20, 30, 100)]
    training, evaluation = material.split(near, 0.4)
    assert [e.frame for e in training] == []
    assert [e.frame for e in evaluation] == [30, 100]


def test_sources_are_drawn_by_weight_and_the_root_of_their_number(
    material: ModuleType, tmp_path: Path
) -> None:
    own = [
        material.OwnLabels(drive(tmp_path / name, count), weight=weight)
        for name, count, weight in (("one", 20, 1.0), ("two", 5, 3.0))
    ]
    for place, each in enumerate(own):
        named = each.labels.with_name(f"{place}.jsonl")
        each.labels.rename(named)
        own[place] = material.OwnLabels(named, weight=each.weight)
    groups = material.Material(own=tuple(own)).groups()
    assert [group.source for group in groups] == ["0.jsonl", "1.jsonl"]
    np.testing.assert_allclose([group.share for group in groups], [4 / 10, 6 / 10])
    left = material.Material(own=tuple(own), left_out=frozenset({"1.jsonl"}))
    assert {each.source for each in left.training} == {"0.jsonl"}
    assert len(left.evaluation) == 4 + 5
    with pytest.raises(material.MaterialError, match="no such source"):
        material.Material(own=tuple(own), left_out=frozenset({"2.jsonl"})).require()


def test_a_partial_label_keeps_what_it_does_not_know(material: ModuleType, tmp_path: Path) -> None:
    labels = drive(tmp_path / "drive", 1)
    record = json.loads(labels.read_text())
    record |= {"complete": False, "sides": ["L", "R"], "teacher_lanes": [record["lanes"].pop()]}
    labels.write_text(json.dumps(record))
    [frame] = material.TrainingImages(material.read_labels(labels))
    assert (frame.complete, frame.own_lane) == (False, True)
    np.testing.assert_array_equal(frame.lane_weight, [1, 1, 0])


def test_a_folder_of_culane_is_read(material: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "driver_1" / "a.MP4"
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / "00030.jpg"), np.zeros((590, 1640, 3), np.uint8))
    (folder / "00030.lines.txt").write_text("100 590 200 490 300 390 \n820 590 820 390")
    [each] = material.read_labels(tmp_path)
    x = dict(zip(each.h_samples, each.lanes[0], strict=True))
    assert (x[390], x[490], x[540], x[590], x[380]) == (300, 200, 150, 100, -2)
    (folder / "00030.lines.txt").write_text("1 2 3")
    with pytest.raises(material.MaterialError, match=r"00030.lines.txt: a line is not"):
        material.read_labels(tmp_path)
