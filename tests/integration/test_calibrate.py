"""`edge-server calibrate` from a board's pictures to lanes in metres, as a user types it."""

from __future__ import annotations

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.board_pictures import POSES, BoardCamera

from edge_server.cameras.calibration import read_calibration, read_tables
from edge_server.cli.main import run_command
from edge_server.lanes.camera_model import Lens
from edge_server.tools.boards import CalibrationBoard
from edge_server.tools.road.scene import RoadScene

DATA = Path(__file__).parents[3] / "shared/data/lanes"
LENS = Lens("pinhole", 800, 450, 700.0, 695.0, 405.0, 228.0, (-0.22, 0.05, 0.001, -0.001, 0.0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calibrate(*words: str) -> int:
    return run_command(["calibrate", *words])


def a_lens_of_the_drawn_road(file: Path) -> RoadScene:
    scene = RoadScene.for_camera(7)
    focal = scene.camera.focal * 1280
    file.write_text(
        f'[lens]\nkind = "pinhole"\nwidth = 1280\nheight = 720\nfx = {focal}\nfy = {focal}\n'
        f"cx = 640.0\ncy = {scene.camera.horizon * 720}\ndistortion = [0, 0, 0, 0, 0]\n"
    )
    return scene


def test_pictures_of_a_board_become_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board, camera = CalibrationBoard.of("chessboard:9x6:0.025"), BoardCamera(LENS)
    for number, pose in enumerate(POSES):
        cv2.imwrite(f"view{number}.png", camera.picture(board, *pose))
    cv2.imwrite("wall.png", np.full((450, 800, 3), 90, np.uint8))
    cv2.imwrite("other.png", np.full((300, 800, 3), 90, np.uint8))
    pictures = sorted(str(path) for path in Path().glob("view*.png"))
    words = ("--board", "chessboard:9x6:0.025", "--output", "front.toml")
    assert calibrate("intrinsics", *pictures, "wall.png", "other.png", *words) == 0
    said = capsys.readouterr().out
    assert "wall.png: left out: the board is not seen" in said
    assert "other.png: left out: 800 x 300 px" in said
    assert re.search(r"view0\.png: 0\.\d+ px", said)
    error = re.search(r"reprojection error (0\.\d+) px, of 10 views", said)
    assert error is not None
    tables = read_tables("front.toml")
    assert tables.lens.fx == pytest.approx(700.0, rel=0.01)
    assert tables.lens.reprojection_error_px == pytest.approx(float(error[1]), abs=1e-3)
    residuals = cv2.imread("front.residuals.png")
    assert residuals.shape == (450, 800, 3)
    # Without a mounting nothing is on the road; then it is, and a new lens keeps it.
    assert calibrate("show", "front.toml", "view0.png", "--output", "s.png") == 78
    assert calibrate("mounting", "front.toml", "--height", "1.4", "--pitch", "2") == 0
    assert read_calibration("front.toml").model.mounting.height_m == 1.4
    assert calibrate("intrinsics", *pictures, *words) == 0
    assert read_tables("front.toml").mounting is not None


def test_marks_on_the_ground_become_a_mounting(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = a_lens_of_the_drawn_road(folder / "front.toml")
    focal, horizon = scene.camera.focal * 1280, scene.camera.horizon * 720
    marks = []
    for x, y in ((6.0, 2.0), (6.0, -2.0), (14.0, 2.0), (14.0, -2.0)):
        u, v = 640 - focal * y / x, horizon + focal * scene.camera.height_m / x
        marks += ["--mark", f"{u:.1f},{v:.1f}={x},{y}"]
    assert calibrate("mounting", "front.toml", *marks) == 0
    mounting = read_calibration("front.toml").model.mounting
    assert mounting.height_m == pytest.approx(scene.camera.height_m, abs=0.02)
    assert mounting.pitch_rad == pytest.approx(0.0, abs=np.radians(0.2))
    assert "reprojection error 0.0" in capsys.readouterr().out
    assert calibrate("mounting", "front.toml", *marks, "--height", "1.3") == 78
    assert calibrate("mounting", "front.toml") == 78


def test_a_straight_drive_becomes_a_mounting(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = a_lens_of_the_drawn_road(folder / "front.toml")
    words = ("estimate", "front.toml", "synthetic://road?seed=7&frames=40")
    assert calibrate(*words, "--lane-width", "3.63", "--write") == 0
    said = capsys.readouterr().out
    assert re.search(r"pitch [+-]0\.\d+ deg \+- 0\.\d+ \(8 of 10 frames", said)
    dashes = re.search(r"dashes: every (\d+\.\d) m near, (\d+\.\d) m far", said)
    assert dashes is not None
    assert [float(each) for each in dashes.groups()] == pytest.approx([12.0, 12.0], rel=0.04)
    assert "doubtful" not in said
    mounting = read_calibration("front.toml").model.mounting
    assert mounting.pitch_rad == pytest.approx(0.0, abs=np.radians(0.1))
    assert mounting.yaw_rad == pytest.approx(0.0, abs=np.radians(0.8))
    assert mounting.height_m == pytest.approx(scene.camera.height_m, rel=0.05)
    assert calibrate("show", "front.toml", words[2], "--lanes", "--output", "s.png") == 0
    width = re.search(r"lane width (\d\.\d+) m", capsys.readouterr().out)
    assert width is not None
    assert float(width[1]) == pytest.approx(3.63, abs=0.2)
    assert cv2.imread("s.png").shape[0] == 720


@pytest.mark.parametrize(
    ("height", "code", "text"),
    [
        pytest.param(
            "1.5",
            0,
            "is wide for lanes of 3.6 m (--lane-width): the height or the focal length",
            marks=pytest.mark.long,
        ),
        ("2.6", 78, "m wide: measure the camera's height again"),
    ],
)
def test_a_height_that_makes_other_lanes_is_doubted_or_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], height: str, code: int, text: str
) -> None:
    a_lens_of_the_drawn_road(folder / "front.toml")
    before = Path("front.toml").read_bytes()
    words = ("estimate", "front.toml", "synthetic://road?seed=7&frames=40", "--write")
    assert calibrate(*words, "--height", height) == code
    said = capsys.readouterr()
    assert text in said.out + said.err
    assert (Path("front.toml").read_bytes() == before) is (code == 78)


def test_too_little_road_is_no_estimate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_lens_of_the_drawn_road(folder / "front.toml")
    assert calibrate("estimate", "front.toml", "synthetic://road?seed=7&frames=5") == 78
    assert "drive longer, straight" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the pictures and clips in {DATA}")
def test_the_lanes_of_a_real_motorway_have_the_width_of_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    views = sorted(str(path) for path in (DATA / "calibration").glob("*.jpg"))
    words = ("--board", "chessboard:9x6:0.025", "--output", "front.toml")
    assert calibrate("intrinsics", *views, *words) == 0
    assert "of 15 views" in capsys.readouterr().out
    # Of another camera: the clip of its own ends on a bridge, where the road is not flat.
    clip = str(DATA / "clips/highway_960x540.mp4")
    assert calibrate("lens", "front.toml", "--fov", "57", "--size", "960x540") == 0
    calibrate("mounting", "front.toml", "--height", "1.2")
    before = (folder / "front.toml").read_text()
    assert calibrate("estimate", "front.toml", clip, "--height", "1.31", "--frames", "60") == 0
    said = capsys.readouterr().out
    assert re.search(r"lanes of 3\.[78]\d m for a height of 1\.31 m", said)
    assert re.search(r"dashes: every 1[12]\.\d m near, 1[12]\.\d m far", said)
    assert "not written" in said
    assert (folder / "front.toml").read_text() == before
    assert (
        calibrate(
            "estimate", "front.toml", clip, "--lane-width", "3.7", "--frames", "60", "--write"
        )
        == 0
    )
    assert calibrate("show", "front.toml", clip, "--lanes", "--output", "s.png") == 0
    width = re.search(r"lane width (\d\.\d+) m", capsys.readouterr().out)
    assert width is not None
    assert 3.4 < float(width[1]) < 4.0
