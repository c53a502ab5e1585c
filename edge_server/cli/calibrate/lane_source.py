"""Frames of a source, every one of them, with the lanes that a model detects in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.installation import shipped_models
from edge_server.cameras.camera import Camera
from edge_server.cameras.colour import bgr_of
from edge_server.cameras.frame import Pace, Recording
from edge_server.cameras.source import open_source
from edge_server.daemon.model_parts import chosen_control, chosen_scheduling
from edge_server.errors import Unavailable
from edge_server.gpu.devices import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.settings import Repository, Serving

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import Lane

# Closing the models.
_CLOSE_S = 5.0


def frames_of(uri: str) -> Iterator[NDArray[np.uint8]]:
    """Yield each image of `uri`, (H, W, 3) uint8 BGR, a recording as fast as it can be read.

    Raises:
        SourceError: it gives no images.
    """
    for frame in _frames(uri):
        yield bgr_of(frame.image)


def lanes_in(
    uri: str, repositories: Sequence[str] | None, model: str
) -> Generator[tuple[NDArray[np.uint8], Sequence[Lane]], None, None]:
    """Yield each image of `uri` with its lanes, px.

    Args:
        uri: see `open_source`.
        repositories: paths of the models; None or empty are the shipped ones.
        model: the name of the lane model.

    Raises:
        SourceError: the source gives no images.
        SettingsError, ModelConfigError, Unavailable: there is no such lane model.
    """
    paths = tuple(repositories or (str(shipped_models()),))
    registry, scheduling, devices = ModelRegistry(), chosen_scheduling(Serving()), Devices()
    control = chosen_control(registry, scheduling, devices, Repository(paths=paths))
    try:
        if failed := control.load_first():
            raise Unavailable("\n".join(entry.reason for entry in failed))
        pipeline = LanePipeline(Camera("calibrate", uri), DataPlane(registry), model, ())
        pipeline.validate()
        for frame in _frames(uri):
            yield bgr_of(frame.image), pipeline.detect(frame).lanes
    finally:
        control.close(_CLOSE_S)
        scheduling.close()
        devices.close()


def _frames(uri: str) -> Iterator[Frame]:
    source = open_source(uri)
    if isinstance(source, Recording):
        source.pace = Pace(0.0)
    try:
        while (frame := source.read()) is not None:
            yield frame
    finally:
        source.close()
