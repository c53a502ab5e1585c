"""A rendered drive along a road: a source of frames with known lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.cameras.pace import Pace
from edge_server.cameras.synthetic.road_renderer import render
from edge_server.cameras.synthetic.road_scene import RoadScene

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_FPS = 30.0
SPEED_M_S = 25.0


class SyntheticRoad:
    """Drives along a road at `SPEED_M_S`; a FrameSource.

    The same arguments always give the same images.

    Attributes:
        truth: the lanes of the last image, in the form of `road_renderer.render`: each (N, 2)
            float32 x, y in pixels; empty before the first image.

    Args:
        seed: selects the road.
        fps: frames per second, `DEFAULT_FPS` if None; 0 renders at full speed, with the steps of
            `DEFAULT_FPS`.
        width_px, height_px: of the images.
        frames: number of frames until the drive ends; 0 never ends.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fps: float | None = None,
        width_px: int = 1280,
        height_px: int = 720,
        frames: int = 0,
    ) -> None:
        rate = DEFAULT_FPS if fps is None else fps
        self.truth: list[NDArray[np.float32]] = []
        self._scene = RoadScene.for_camera(seed)
        self._step_m = SPEED_M_S / (rate or DEFAULT_FPS)
        self._width_px = width_px
        self._height_px = height_px
        self._frames = frames
        self._given = 0
        self._pace = Pace(rate)

    def read(self) -> NDArray[np.uint8] | None:
        """Return the next image, (H, W, 3) uint8 BGR, when it is due; None at the end."""
        if self._frames and self._given >= self._frames:
            return None
        distance_m = self._given * self._step_m
        image, self.truth = render(self._scene, distance_m, self._width_px, self._height_px)
        self._given += 1
        self._pace.wait()
        return image

    def close(self) -> None:
        """Do nothing: the source holds no resources."""
