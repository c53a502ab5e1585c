"""What a launch is told, and what cannot be launched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.gpu.preprocess_kernel import (
    FrameAddress,
    FrameLayout,
    FramePreprocess,
    PreprocessArgs,
    size_fault,
)
from edge_server.pixels import PixelFormat

HD = FrameLayout.packed(PixelFormat.NV12, 1920, 1080)


def test_a_launch_names_kernel_grid_block_and_arguments() -> None:
    made = FramePreprocess(HD, 640, 360, scale=0.5, half=True)
    launch = made.launch([FrameAddress(4096, 8192)] * 2, 65536)
    assert launch.kernel == "nv12_to_nchw"
    assert launch.grid == (5, 45, 2)
    assert launch.block == (32, 8, 1)
    args = PreprocessArgs.from_buffer_copy(launch.args)
    assert (args.out, args.pixels[1], args.chroma[1], args.pixels[2]) == (65536, 4096, 8192, 0)
    assert (args.step_x, args.step_y) == (3.0, 3.0)
    assert (args.region_width, args.region_height) == (1920, 1080)
    assert (args.scale, args.out_is_half) == (0.5, 1)


def test_with_a_map_the_kernel_is_another() -> None:
    made = FramePreprocess(HD, 640, 360, scale=1, undistortion=(16, 32))
    launch = made.launch([FrameAddress(4096, 8192)], 65536)
    assert launch.kernel == "nv12_to_nchw_undistorted"
    args = PreprocessArgs.from_buffer_copy(launch.args)
    assert (args.map_position, args.map_fraction) == (16, 32)


@given(
    st.sampled_from(PixelFormat),
    st.integers(1, 16383).map(lambda half: 2 * half),
    st.integers(1, 32767),
)
def test_every_scale_has_a_tile(pixel_format: PixelFormat, width: int, out_width: int) -> None:
    frame = FrameLayout.packed(pixel_format, width, 2)
    launch = FramePreprocess(frame, out_width, 2, scale=1).launch([frame.address(16)], 64)
    args = PreprocessArgs.from_buffer_copy(launch.args)
    assert launch.grid[0] * args.tile_width >= out_width > (launch.grid[0] - 1) * args.tile_width
    assert launch.grid[1] * launch.block[1] >= 2


@pytest.mark.parametrize(
    ("pixel_format", "width", "height", "fault"),
    [
        (PixelFormat.NV12, 641, 480, "the width of nv12 frames is even"),
        (PixelFormat.YUY2, 641, 480, "the width of yuy2 frames is even"),
        (PixelFormat.NV12, 640, 481, "the height of nv12 frames is even"),
        (PixelFormat.BGR, 0, 480, "a side has at most 32767 px"),
        (PixelFormat.BGR, 640, 40000, "a side has at most 32767 px"),
        (PixelFormat.BGR, 641, 481, ""),
    ],
)
def test_a_size_that_no_frame_has_is_told(
    pixel_format: PixelFormat, width: int, height: int, fault: str
) -> None:
    assert size_fault(pixel_format, width, height) == fault
