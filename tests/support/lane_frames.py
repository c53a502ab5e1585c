"""Lanes as the loop of a camera gives them to its listeners."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.types import Lane, LaneFrame, StageLatency

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROWS = np.linspace(719, 200, 72)
FOUR_LANES = tuple(
    Lane(np.stack([_ROWS * k, _ROWS], axis=1).astype(np.float32), 0.9) for k in range(4)
)


def lane_frame(
    frame_id: int,
    camera: str = "front",
    lanes: Sequence[Lane] = FOUR_LANES,
    capture_mono_ns: int | None = None,
) -> LaneFrame:
    """Return the lanes of a picture of 1280 x 720 px that is taken now, or then."""
    return LaneFrame(
        camera=camera,
        frame_id=frame_id,
        dropped=0,
        capture_mono_ns=time.monotonic_ns() if capture_mono_ns is None else capture_mono_ns,
        capture_epoch_ns=time.time_ns(),
        width=1280,
        height=720,
        model_name="lane_detection",
        model_version="1",
        latency_us=StageLatency(1, 2, 3, 4),
        lanes=tuple(lanes),
    )
