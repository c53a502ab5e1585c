"""What a developer of vehicle software makes of the published .proto files, and a calibration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edge_server.cameras.calibration import CalibrationTables, LensTable, MountingTable, text_of
from edge_server.tools.road.scene import RoadScene

PROTO = Path(__file__).parents[2] / "edge_server/proto"
CLIENT = Path(__file__).parents[2] / "clients/python"
SEED = 7


def generate_python(folder: Path) -> None:
    """Write the stubs of `edge.lanes.v1`, as docs/lanes.md says."""
    files = [f"edge/lanes/v1/{name}.proto" for name in ("lanes", "events", "lane_service")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)]
    command += [f"--python_out={folder}", f"--grpc_python_out={folder}", *files]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})


def write_calibration(path: Path) -> None:
    """Write the calibration of the drawn road's camera, which looks level and is shifted."""
    camera = RoadScene.for_camera(SEED).camera
    focal_px = camera.focal * 1280
    lens = LensTable(
        "pinhole", 1280, 720, focal_px, focal_px, 639.5, camera.horizon * 720 - 0.5, (0.0,) * 5
    )
    path.write_text(text_of(CalibrationTables(lens, MountingTable(camera.height_m))))
