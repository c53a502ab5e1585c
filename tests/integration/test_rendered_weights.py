"""The weights learnt from rendered roads alone serve where one setting names them."""

from __future__ import annotations

import numpy as np

from edge_server.board.installation import shipped_models
from edge_server.daemon.parts import chosen_control
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.requests import InferRequest
from edge_server.settings import Repository
from edge_server.tensors import Tensor
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene


def lines_of(config_name: str, bgr: np.ndarray) -> np.ndarray:
    """The lines that the shipped models find with a setting: x of each, (N, 72) px."""
    registry, scheduling = ModelRegistry(), Scheduling()
    settings = Repository(paths=(str(shipped_models()),), config_name=config_name)
    control = chosen_control(registry, scheduling, Devices(), settings)
    control.start()
    try:
        image = {"image": Tensor.of(bgr[np.newaxis])}
        request = InferRequest("lane_detection", image, outputs=("lane_points",))
        return DataPlane(registry).infer(request).outputs["lane_points"].array[0, :, :, 0]
    finally:
        control.close(30.0)
        scheduling.close()


def test_the_weights_of_rendered_roads_find_the_lines_of_one() -> None:
    bgr, truth = render(RoadScene.for_camera(2**31 + 5), 40.0)
    rows_px = 720.0 * np.linspace(1.0, 0.0, 72)
    own = sorted(truth, key=lambda line: abs(line[0, 0] - 640.0))[:2]
    found = {name: lines_of(name, bgr) for name in ("rendered", "")}
    for lines in found.values():
        for line in own:
            expected = np.interp(rows_px, line[::-1, 1], line[::-1, 0], np.nan, np.nan)
            off_px = np.abs(np.where(lines < 0, np.nan, lines) - expected)
            assert np.nanmin(np.nanmedian(off_px, axis=1)) < 12
    assert not np.array_equal(found["rendered"], found[""])
