"""A camera's own format through the shipped ensemble: the same road has the same lanes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.integer_colours import COLOURS, camera_image

from edge_server.pixels import Image, PixelFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.daemon_process import Process

MODELS = Path(__file__).parents[2] / "models"
# Where the road lies in a larger frame; the chroma of NV12 goes by pairs of pixels.
X, Y = 38, 16
# Each format, and each of the colours.
FORMATS = [
    (PixelFormat.BGR, COLOURS[0]),
    (PixelFormat.YUY2, COLOURS[1]),
    (PixelFormat.NV12, COLOURS[2]),
    (PixelFormat.NV12, COLOURS[3]),
    (PixelFormat.I420, COLOURS[0]),
]


def repository(folder: Path, crop: str) -> Path:
    """The shipped one, with a crop."""
    made = folder / "models"
    shutil.copytree(MODELS, made)
    with (made / "lane_preprocess" / "config.pbtxt").open("a") as config:
        config.write(f'parameters {{ key: "crop" value {{ string_value: "{crop}" }} }}\n')
    return made


def lanes(client: triton.InferenceServerClient, image: Image) -> tuple[np.ndarray, np.ndarray]:
    """Points and scores, from left to right."""
    pixels = image.packed()[np.newaxis]
    tensor = triton.InferInput("image", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels)
    # BGR is what a frame without parameters is.
    parameters = {
        "pixel_format": image.pixel_format.value,
        "color_matrix": image.colour.matrix.value,
        "color_range": image.colour.range.value,
    }
    answer = client.infer(
        "lane_detection",
        [tensor],
        parameters=None if image.pixel_format is PixelFormat.BGR else parameters,
    )
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
    points, scores = lanes(client(shipped), Image.of_bgr(road_image))
    assert len(scores) >= 2
    return points, scores


@pytest.mark.parametrize("cropped", [False, True], ids=["all", "crop"])
def test_each_format_has_the_lanes_of_bgr_in_pixels_of_the_crop(
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
    tmp_path: Path,
    road_image: np.ndarray,
    seen_as_bgr: tuple[np.ndarray, np.ndarray],
    *,
    cropped: bool,
) -> None:
    height, width = road_image.shape[:2]
    image, models = road_image, MODELS
    if cropped:
        image = cv2.copyMakeBorder(road_image, Y, 34, X, 22, cv2.BORDER_CONSTANT, value=(0, 0, 255))
        models = repository(tmp_path, f"{X},{Y},{width},{height}")
    process = start("--model-repository", str(models))
    for pixel_format, colour in FORMATS:
        points, scores = lanes(client(process), camera_image(pixel_format, image, colour))
        assert points.shape == seen_as_bgr[0].shape
        np.testing.assert_allclose(scores, seen_as_bgr[1], atol=0.02)
        both = (points[..., 0] >= 0) & (seen_as_bgr[0][..., 0] >= 0)
        assert both.mean() > 0.3
        apart_px = np.abs(points - seen_as_bgr[0])[both]
        # Chroma has half the pixels, and 8 bits lose a little on the way.
        assert apart_px.max() < 2
    assert process.terminate() == 0
