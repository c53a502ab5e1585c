"""A camera's own format through the shipped ensemble: the same road has the same lanes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.conftest import Process

MODELS = Path(__file__).parents[2] / "models"
# Where the road lies in a larger frame; the chroma of NV12 goes by pairs of pixels.
X, Y = 38, 16


def nv12_of(bgr: np.ndarray) -> np.ndarray:
    height, width = bgr.shape[:2]
    planar = cv2.cvtColor(bgr, cv2.COLOR_BGR2YUV_I420)
    u, v = planar[height:].reshape(2, height // 2, width // 2)
    return np.concatenate([planar[:height], np.stack([u, v], axis=-1).reshape(-1, width)])


def repository(folder: Path, crop: str = "") -> Path:
    """The shipped one, for a camera that gives NV12."""
    made = folder / "models"
    shutil.copytree(MODELS, made)
    for name in ("lane_preprocess", "lane_detection"):
        path = made / name / "config.pbtxt"
        bgr, nv12 = "dims: [ -1, -1, 3 ]", "dims: [ -1, -1 ]"
        assert bgr in path.read_text()
        path.write_text(path.read_text().replace(bgr, nv12))
    with (made / "lane_preprocess" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "pixel_format" value { string_value: "nv12" } }\n')
        if crop:
            config.write(f'parameters {{ key: "crop" value {{ string_value: "{crop}" }} }}\n')
    return made


def lanes(client: triton.InferenceServerClient, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and scores, from left to right."""
    tensor = triton.InferInput("image", [1, *image.shape], "UINT8")
    tensor.set_data_from_numpy(image[np.newaxis])
    answer = client.infer("lane_detection", [tensor])
    points, scores = answer.as_numpy("lane_points")[0], answer.as_numpy("lane_scores")[0]
    # Where they meet the lowest rows they differ most.
    order = np.argsort([lane[lane[:, 0] >= 0][0, 0] for lane in points])
    return points[order], scores[order]


@pytest.fixture
def seen_as_bgr(
    shipped: Process,
    client: Callable[[Process], triton.InferenceServerClient],
    road_image: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    points, scores = lanes(client(shipped), road_image)
    assert len(scores) >= 2
    return points, scores


@pytest.mark.parametrize("cropped", [False, True], ids=["all", "crop"])
def test_nv12_has_the_lanes_of_bgr_in_pixels_of_the_crop(
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    tmp_path: Path,
    road_image: np.ndarray,
    seen_as_bgr: tuple[np.ndarray, np.ndarray],
    *,
    cropped: bool,
) -> None:
    height, width = road_image.shape[:2]
    image, crop = road_image, ""
    if cropped:
        image = cv2.copyMakeBorder(road_image, Y, 34, X, 22, cv2.BORDER_CONSTANT, value=(0, 0, 255))
        crop = f"{X},{Y},{width},{height}"
    process = start("--model-repository", str(repository(tmp_path, crop)))
    points, scores = lanes(client(process), nv12_of(image))
    assert points.shape == seen_as_bgr[0].shape
    np.testing.assert_allclose(scores, seen_as_bgr[1], atol=0.02)
    both = (points[..., 0] >= 0) & (seen_as_bgr[0][..., 0] >= 0)
    assert both.mean() > 0.3
    apart_px = np.abs(points - seen_as_bgr[0])[both]
    # Chroma has half the pixels, and 8 bits lose a little on the way.
    assert apart_px.max() < 2
    assert process.terminate() == 0
