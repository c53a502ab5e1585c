"""The lane network: a slim ResNet, strip context, and a LaneATT head without gathers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_server.lanes.decode import COLUMN_COUNT, FIRST_X_COLUMN, INPUT_WIDTH_PX, ROW_COUNT
from lane_training.anchors import ANCHOR_COUNT, anchor_lines

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRUNK_CHANNELS = (32, 48, 96, 160)
FUSED_CHANNELS = 64
HIDDEN = 96
ROW_STRIDE_PX = 32
COLUMN_STRIDE_PX = 16
# Rows above this one lie higher than any horizon the network is trained for (y < 96 of 360).
FIRST_POOLED_ROW = 3
POOLED_ROWS = 9
POOLED_COLUMNS = 40
OFFSET_SCALE_PX = 20.0
LENGTH_SCALE = 10.0


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, as in ResNet-18."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.stride == 2 and x.shape[2] % 2:
            # Changes no result, but oneDNN's backward pass of a stride over an odd height is
            # twenty times slower.
            x = functional.pad(x, (0, 0, 0, 1))
        return torch.relu(self.body(x) + self.shortcut(x))


class StripContext(nn.Module):
    """Lets every cell see its whole row and column: lane lines are long and thin."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.across = nn.Conv2d(channels, channels, (1, 21), padding=(0, 10), groups=channels)
        self.along = nn.Conv2d(channels, channels, (13, 1), padding=(6, 0), groups=channels)
        self.norm = nn.BatchNorm2d(channels)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        strips = torch.relu(self.norm(self.across(x) + self.along(x)))
        return x + self.mix(strips)


def interpolation_matrix() -> NDArray[np.float16]:
    """Weights that read the pooled map along every anchor, linear between columns.

    Anchors start 5 px apart and cells are 16 px wide, so taking the nearest cell would show
    neighbouring anchors the same features and hide the position within a cell.

    Returns:
        (2784, 9 * 40) float16; a row has at most two weights per pooled row, none where the
        anchor has left the image.
    """
    start_x, start_y, angle_deg = anchor_lines()
    row_y = (np.arange(POOLED_ROWS) + FIRST_POOLED_ROW) * ROW_STRIDE_PX / 360.0
    x_px = INPUT_WIDTH_PX * (
        start_x[:, None] + (start_y[:, None] - row_y) / np.tan(np.radians(angle_deg))[:, None]
    )
    inside = (x_px >= 0.0) & (x_px <= INPUT_WIDTH_PX) & (row_y <= start_y[:, None] + 1e-6)
    column = np.clip(x_px / COLUMN_STRIDE_PX, 0.0, POOLED_COLUMNS - 1.0)
    left = np.minimum(np.floor(column).astype(np.int64), POOLED_COLUMNS - 2)
    share_right = column - left
    weights = np.zeros((ANCHOR_COUNT, POOLED_ROWS, POOLED_COLUMNS))
    anchor, row = np.nonzero(inside)
    weights[anchor, row, left[inside]] = 1.0 - share_right[inside]
    weights[anchor, row, left[inside] + 1] = share_right[inside]
    return weights.reshape(ANCHOR_COUNT, -1).astype(np.float16)


def anchor_factors() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The anchors as a product of two small matrices, so that no file carries the full table.

    Returns:
        lines: (2784, 4) float32: start_y from the bottom, start_x, x in pixels at the top row,
            pixels moved to the left per image height travelled down.
        columns: (4, 77) float32 with `lines @ columns == lane_anchors()`.
    """
    start_x, start_y, angle_deg = anchor_lines()
    run_px = INPUT_WIDTH_PX / np.tan(np.radians(angle_deg))
    lines = np.stack(
        (1.0 - start_y, start_x, INPUT_WIDTH_PX * start_x + start_y * run_px, run_px), axis=1
    )
    columns = np.zeros((4, COLUMN_COUNT))
    columns[0, 2] = 1.0
    columns[1, 3] = 1.0
    columns[2, FIRST_X_COLUMN:] = 1.0
    columns[3, FIRST_X_COLUMN:] = -np.linspace(1.0, 0.0, ROW_COUNT)
    return lines.astype(np.float32), columns.astype(np.float32)


def anchor_shape_features() -> NDArray[np.float32]:
    """What the head may know of an anchor besides the image: (2784, 8) float32, about -1..1."""
    start_x, start_y, angle_deg = anchor_lines()
    lean = np.cos(np.radians(angle_deg))
    x, y = 2.0 * start_x - 1.0, 2.0 * start_y - 1.0
    features = np.stack((x, y, lean, x * lean, y * lean, x * x, lean * lean, x * lean * lean), 1)
    return features.astype(np.float32)


class LaneNetwork(nn.Module):
    """Image in, LaneATT proposals out, in convolutions and matrix products only.

    Input:  (B, 3, 360, 640) float32, NCHW, BGR, 0..1.
    Output: (B, 2784, 77) float32; columns 0-1 raw logits, 2-3 the anchor's start, 4 the number
        of rows from the start upwards, 5.. x in pixels of the 640-wide input.
    """

    interpolation: Tensor
    anchor_lines: Tensor
    anchor_columns: Tensor
    anchor_shape: Tensor

    def __init__(self) -> None:
        super().__init__()
        first, second, third, fourth = TRUNK_CHANNELS
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 4, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True)
        )
        self.stride_16 = nn.Sequential(
            ResidualBlock(first, first, 1),
            ResidualBlock(first, second, 2),
            ResidualBlock(second, second, 1),
            ResidualBlock(second, third, 2),
            ResidualBlock(third, third, 1),
        )
        self.stride_32 = nn.Sequential(
            ResidualBlock(third, fourth, 2),
            ResidualBlock(fourth, fourth, 1),
            StripContext(fourth),
            StripContext(fourth),
        )
        self.lateral = nn.Conv2d(third, FUSED_CHANNELS, 3, (2, 1), 1, bias=False)
        self.widen = nn.ConvTranspose2d(fourth, FUSED_CHANNELS, (1, 2), (1, 2))
        self.fuse = nn.Sequential(nn.BatchNorm2d(FUSED_CHANNELS), nn.ReLU(inplace=True))
        self.row_weights = nn.Parameter(torch.empty(POOLED_ROWS, FUSED_CHANNELS, HIDDEN))
        self.shape_term = nn.Linear(8, HIDDEN)
        self.predict = nn.Linear(HIDDEN, 2 + 1 + ROW_COUNT)

        lines, columns = anchor_factors()
        self.register_buffer("interpolation", torch.from_numpy(interpolation_matrix()), False)
        self.register_buffer("anchor_lines", torch.from_numpy(lines), False)
        self.register_buffer("anchor_columns", torch.from_numpy(columns), False)
        self.register_buffer("anchor_shape", torch.from_numpy(anchor_shape_features()), False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.row_weights, std=(FUSED_CHANNELS * POOLED_ROWS) ** -0.5)
        nn.init.normal_(self.predict.weight, std=0.01)
        with torch.no_grad():
            self.predict.bias.zero_()
            # One anchor in a hundred is a lane; saying so at the start keeps the first loss small.
            self.predict.bias[0], self.predict.bias[1] = 2.3, -2.3
            self.predict.bias[2] = 40.0 / LENGTH_SCALE

    def features(self, image: Tensor) -> Tensor:
        """(B, 64, 9, 40): rows 96, 128 .. 352 px, columns 0, 16 .. 624 px of the input."""
        stride_16 = self.stride_16(self.stem((image - 0.4) * 4.0))
        fused = self.lateral(stride_16) + self.widen(self.stride_32(stride_16))
        return self.fuse(fused[:, :, FIRST_POOLED_ROW:])

    def head(self, features: Tensor) -> Tensor:
        """Raw predictions (B, 2784, 75): two logits, length, 72 offsets."""
        cells = features.permute(0, 2, 3, 1) @ self.row_weights
        cells = cells.reshape(-1, POOLED_ROWS * POOLED_COLUMNS, HIDDEN)
        along_anchor = self.interpolation.to(cells.dtype) @ cells
        shape_term = self.shape_term(self.anchor_shape)
        return self.predict(torch.relu(along_anchor + shape_term).float())

    def proposals(self, raw: Tensor) -> Tensor:
        """Anchors moved by the raw predictions."""
        zeros = torch.zeros_like(raw[:, :, :2])
        scaled = torch.cat(
            (raw[:, :, :2], zeros, raw[:, :, 2:3] * LENGTH_SCALE, raw[:, :, 3:] * OFFSET_SCALE_PX),
            dim=2,
        )
        return scaled + self.anchor_lines @ self.anchor_columns

    def forward(self, image: Tensor) -> Tensor:
        return self.proposals(self.head(self.features(image).float()))
