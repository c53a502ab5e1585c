"""The comparison catches kernels that are wrong: each slip below is planted in a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.backends.vision.preprocess_cpu import UndistortionMap
from edge_server.gpu.kernels.preprocess import CropRegion, PixelFormat
from tests.integration.kernels.shim import CameraFrame, DesiredModel, by_opencv

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.kernels.conftest import BuildShim
    from tests.integration.kernels.shim import Shim

pytestmark = pytest.mark.long

# What stands in preprocess.cu, and the slip.
VISIBLE = {
    "chroma swapped": ("chroma[x & ~1], chroma[x | 1]", "chroma[x | 1], chroma[x & ~1]"),
    "chroma of the neighbour": ("pair[1], pair[3]", "pair[3], pair[1]"),
    "half a pixel off": ("position + 0.5, step), -0.5", "position, step), 0.0"),
    "video range forgotten": ("max(y - 16, 0)", "max(y, 0)"),
    "channels reversed": ("packed[c] |= (unsigned)value", "packed[2 - c] |= (unsigned)value"),
    "the crop's corner forgotten": ("args.region_x + tap.index", "tap.index"),
    "the weights exchanged": ("bgr[c] * near;", "bgr[c] * (2048 - near);"),
    "the row below not read": ("if (below)", "if (below > 2000)"),
    "the frame of a batch": ("blockIdx.z * 3 * plane", "blockIdx.z * plane"),
    "the stride forgotten": ("(address)y * (address)stride_bytes", "(address)y * row_bytes"),
    "a barrier left out": (
        "    wait_for_copies();\n    __syncthreads();",
        "    wait_for_copies();",
    ),
    "the map's fraction turned": ("fraction & 31, below = fraction >> 5",
                                  "fraction >> 5, below = fraction & 31"),
    "what lies outside is not black": ("int sum[3] = {512, 512, 512};",
                                       "int sum[3] = {99512, 512, 512};"),
}  # fmt: skip
# A grey level or two: the rule of 1/255 lets most of them pass, the equality of the tests does not.
LAST_BIT = {
    "rounding forgotten": (">> 16) + 2) >> 2", ">> 16)) >> 2"),
    "rounding of the colour forgotten": ("1220542 + (1 << 19)", "1220542"),
    "rounding of the map forgotten": ("int sum[3] = {512, 512, 512};", "int sum[3] = {0, 0, 0};"),
    "more precise than OpenCV": ("(above * (top[c] >> 4) >> 16)", "(above * top[c] >> 20)"),
}


def worst(shim: Shim) -> float:
    """The largest error over a handful of frames, in grey levels."""
    random = np.random.default_rng(5)
    lens = UndistortionMap.of_points(
        random.uniform(-3, 80, (30, 50)).astype(np.float32),
        random.uniform(-3, 60, (30, 50)).astype(np.float32),
    )
    errors = []
    for pixel_format in PixelFormat:
        batch = [CameraFrame.random(pixel_format, 74, 58, seed, gap_bytes=10) for seed in range(2)]
        for wish in (
            DesiredModel(50, 30, scale=1),
            DesiredModel(33, 90, scale=1, region=CropRegion(7, 5, 61, 41)),
            DesiredModel(50, 30, scale=1, undistortion=lens),
        ):
            expected = np.stack([by_opencv(frame, wish) for frame in batch])
            errors.append(float(np.abs(shim.run(batch, wish) - expected).max()))
    return max(errors)


def planted(source: Path, slip: tuple[str, str], directory: Path) -> Path:
    text = source.read_text()
    assert slip[0] in text, f"{source.name} has no {slip[0]!r} any more"
    wrong = directory / "wrong.cu"
    wrong.write_text(text.replace(*slip))
    return wrong


def test_the_right_kernels_have_no_error(shim: Shim) -> None:
    assert worst(shim) == 0


@pytest.mark.parametrize("slip", VISIBLE.values(), ids=VISIBLE)
def test_a_wrong_kernel_is_caught(
    slip: tuple[str, str], kernels: Path, build_shim: BuildShim, tmp_path: Path
) -> None:
    assert worst(build_shim(planted(kernels / "preprocess.cu", slip, tmp_path))) > 1


@pytest.mark.parametrize("slip", LAST_BIT.values(), ids=LAST_BIT)
def test_a_kernel_that_rounds_otherwise_is_caught(
    slip: tuple[str, str], kernels: Path, build_shim: BuildShim, tmp_path: Path
) -> None:
    assert worst(build_shim(planted(kernels / "preprocess.cu", slip, tmp_path))) > 0
