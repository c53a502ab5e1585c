"""The lane model is scored through the served ensemble; a wrong label is named, never guessed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).parents[2] / "training" / "evaluate_lane_model.py"
ROWS = list(range(160, 720, 10))
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `road.png` and `label.json`: a rendered road and its true lanes."""
    folder = tmp_path_factory.mktemp("images")
    image, true_lanes = render(RoadScene.for_camera(7), 0.0)
    cv2.imwrite(str(folder / "road.png"), image)
    lanes = [on_rows(points) for points in true_lanes]
    label = {"image": "road.png", "h_samples": ROWS, "lanes": lanes}
    (folder / "label.json").write_text(json.dumps(label))
    return folder


def on_rows(points: np.ndarray) -> list[float]:
    x = np.interp(ROWS, points[::-1, 1], points[::-1, 0], left=-2, right=-2)
    return np.where((x >= 0) & (x < 1280), x, -2.0).tolist()


def evaluate(images: Path, labels: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--labels", labels, "--images", images, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def evaluate_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], images: Path
) -> Callable[..., tuple[object, str]]:
    """The same script within this process, for what fails before a model is loaded."""

    def run(labels: Path, *arguments: str) -> tuple[object, str]:
        options = ["--labels", str(labels), "--images", str(images), *arguments]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, capsys.readouterr().err

    return run


def test_true_lanes_score_and_each_line_of_the_file_counts(images: Path, tmp_path: Path) -> None:
    label = (images / "label.json").read_text()
    nothing: dict[str, Any] = {"raw_file": "road.png", "h_samples": ROWS, "lanes": []}
    labels = tmp_path / "labels.jsonl"
    labels.write_text(f"{label}\n\n{json.dumps(nothing)}\n")
    done = evaluate(images, labels, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == {"accuracy", "fp", "fn", "f1", "images"}
    true, empty = result["images"]
    assert true["image"] == empty["image"] == "road.png"
    assert true["accuracy"] > 0.5
    assert (empty["accuracy"], empty["fn"]) in {(0.0, 0.0), (0.0, 1.0)}
    assert result["accuracy"] == pytest.approx(true["accuracy"] / 2)


def test_sources_are_reported_apart_and_partial_labels_count_lines_alone(
    images: Path, tmp_path: Path
) -> None:
    label = json.loads((images / "label.json").read_text())
    partial = label | {"complete": False, "source": "other", "lanes": label["lanes"][:1]}
    labels = tmp_path / "labels.jsonl"
    labels.write_text("\n".join(json.dumps(each) for each in (label, partial)))
    gallery = tmp_path / "drawn" / "worst.png"
    done = evaluate(images, labels, "--json", "--hard", "2", "--gallery", str(gallery))
    assert done.returncode == 0, done.stderr
    whole, part, *rendered = json.loads(done.stdout)["images"]
    assert (whole["source"], part["source"]) == ("", "other")
    assert (whole["own_lines"], part["own_lines"]) == (2, 1)
    assert whole["own_lines_found"] == 2
    assert "accuracy" not in part
    assert [each["source"] for each in rendered] == ["rendered night", "rendered rain"]
    # Four sources, a row of five tiles each.
    assert cv2.imread(str(gallery)).shape == (4 * 240, 5 * 426, 3)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON: "),
        ("5", "a label is a JSON object"),
        ('{"h_samples": [1], "lanes": []}', "'image' (or 'raw_file') is missing"),
        ('{"image": "road.png", "lanes": []}', "'h_samples' is missing"),
        ('{"image": "road.png", "h_samples": [1]}', "'lanes' is missing"),
        ('{"image": "road.png", "h_samples": [1, 2], "lanes": [[1]]}', "'lanes' has one x for"),
        ('{"image": "road.png", "h_samples": ["a"], "lanes": []}', "are lists of numbers"),
        ('{"image": "road.png", "h_samples": [1, 2], "lanes": [[1, 2], [1]]}', "lists of numbers"),
    ],
)
def test_a_wrong_label_is_named_by_file_and_line(
    evaluate_here: Callable[..., tuple[object, str]],
    images: Path,
    tmp_path: Path,
    line: str,
    says: str,
) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text(f"{(images / 'label.json').read_text()}\n{line}\n")
    code, said = evaluate_here(labels)
    assert code == 1
    assert said.startswith(f"evaluate_lane_model: {labels}:2: ")
    assert says in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("frames", "code", "says"),
    [
        ("x", 2, "'x' is not FIRST-LAST"),
        ("3-9", 1, "--frames chooses none of its 1 labels"),
        ("1-0", 1, "--frames chooses none of its 1 labels"),
    ],
)
def test_a_range_without_labels_is_refused(
    evaluate_here: Callable[..., tuple[object, str]],
    images: Path,
    frames: str,
    code: int,
    says: str,
) -> None:
    ended, said = evaluate_here(images / "label.json", "--frames", frames)
    assert ended == code
    assert says in said


def test_a_wrong_label_ends_the_process_with_one_line(images: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text("{")
    done = evaluate(images, labels)
    assert done.returncode == 1
    assert done.stderr.startswith(f"evaluate_lane_model: {labels}:1: not JSON: ")
    assert len(done.stderr.splitlines()) == 1
