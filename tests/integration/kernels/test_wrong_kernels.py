"""The comparison catches kernels that are wrong: each slip below is planted in a copy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from integration.kernels.shim import CameraFrame, DesiredModel, by_integers

from edge_server.backends.vision.image_preprocess_config import UndistortionMap
from edge_server.pixels import Colour, ColourMatrix, ColourRange, CropRegion, PixelFormat

if TYPE_CHECKING:
    from pathlib import Path

    from integration.kernels.shim import BuildShim, Shim

pytestmark = pytest.mark.long

# What stands in preprocess.cu, and the slip.
VISIBLE = {
    "NV12's chroma swapped": ("FIRST_U = 0, FIRST_V = 1,", "FIRST_U = 1, FIRST_V = 0,"),
    "YUY2's chroma swapped": ("FIRST_U = 1, FIRST_V = 3,", "FIRST_U = 3, FIRST_V = 1,"),
    "I420's V taken from U": ("second.base = args.chroma_v[", "second.base = args.chroma["),
    "I420's V taken from U behind a lens": (
        "second = (const u8*)args.chroma_v[", "second = (const u8*)args.chroma["),
    "chroma's columns as far apart as its rows": (
        "args.chroma_region_height, args.chroma_step_x,",
        "args.chroma_region_height, args.chroma_step_y,"),
    "luma's weights taken for chroma": (
        "mixed = weights_at(chroma_taps, at)", "mixed = weights_at(taps, at)"),
    "a quarter pixel off behind a lens": ("(position >> 1) - 8", "position >> 1"),
    "the crop's corner forgotten in chroma": (
        "half{args.chroma_region_x,", "half{0 * args.chroma_region_x,"),
    "grey tinted": ("int u = 128, v = 128;", "int u = 131, v = 128;"),
    "half a pixel off": ("position + 0.5, step), -0.5", "position, step), 0.0"),
    "video range forgotten": ("(y - args.black)", "y"),
    "the matrix's green exchanged": (
        "args.green_u * u + args.green_v * v", "args.green_v * u + args.green_u * v"),
    "channels reversed": ("packed[c] |= (unsigned)bgr[c]", "packed[2 - c] |= (unsigned)bgr[c]"),
    "the crop's corner forgotten": ("region.x + tap.index", "tap.index"),
    "the weights exchanged": (
        "rows.top[left] * weights.near", "rows.top[left] * (2048 - weights.near)"),
    "the row below not read": ("if (weights.below)", "if (weights.below > 2000)"),
    "the frame of a batch": ("blockIdx.z * 3 * plane", "blockIdx.z * plane"),
    "the stride forgotten": ("(address)y * (address)stride_bytes", "(address)y * row_bytes"),
    "a barrier left out": (
        "    wait_for_copies();\n    __syncthreads();",
        "    wait_for_copies();",
    ),
    "the map's fraction turned": (
        "32 + (fraction & 31)", "32 + (fraction >> 5)"),
    "what lies outside is not black": ("int value = plane.black;", "int value = 99;"),
}  # fmt: skip
# A grey level or two: the rule of 1/255 lets most of them pass, the equality of the tests does not.
LAST_BIT = {
    "rounding forgotten": (">> 16) + 2) >> 2", ">> 16)) >> 2"),
    "rounding of the colour forgotten": ("args.luma + 256", "args.luma"),
    "rounding of the map forgotten": ("int sum = 512;", "int sum = 0;"),
    "more precise than OpenCV": (
        "(weights.above * (top >> 4) >> 16)",
        "(weights.above * top >> 20)",
    ),
}


def worst(shim: Shim) -> float:
    """The largest error over a handful of frames, in grey levels."""
    random = np.random.default_rng(5)
    lens = UndistortionMap.of_points(
        random.uniform(-3, 80, (30, 50)).astype(np.float32),
        random.uniform(-3, 60, (30, 50)).astype(np.float32),
    )
    errors = []
    colours = [Colour(), Colour(ColourMatrix.BT709, ColourRange.FULL)]
    for pixel_format, colour in itertools.product(PixelFormat, colours):
        batch = [
            CameraFrame.random(pixel_format, 74, 58, seed, colour=colour, gap_bytes=10)
            for seed in range(2)
        ]
        for wish in (
            DesiredModel(50, 30, scale=1),
            DesiredModel(33, 90, scale=1, region=CropRegion(7, 5, 61, 41)),
            DesiredModel(50, 30, scale=1, undistortion=lens),
        ):
            expected = np.stack([by_integers(frame, wish) for frame in batch])
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
