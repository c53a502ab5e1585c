"""The JSON messages as msgspec structs, field for field those of `edge/lanes/v1/lanes.proto`.

The published JSON Schema is made from these structs (`scripts/generate_proto`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

SCHEMA: Final = "edge.lanes/1"

FrameStatus = Literal[
    "FRAME_STATUS_OK", "FRAME_STATUS_DEGRADED", "FRAME_STATUS_STALE", "FRAME_STATUS_INVALID"
]

_Count = Annotated[int, Meta(ge=0, lt=2**32)]
_Pixels = Annotated[list[float], Meta(min_length=2)]
# The proto3 JSON mapping writes 64-bit integers as strings: a double holds only 53 bits of them.
_Int64 = Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}$")]
_Rfc3339 = Annotated[str, Meta(pattern=r"^[0-9-]{10}T[0-9:]{8}\.[0-9]{6}Z$")]


class ImagePoints(msgspec.Struct, frozen=True):
    """x[i] belongs to y[i]: px of the original frame, origin top left, bottom of image first."""

    x: _Pixels
    y: _Pixels


class Lane(msgspec.Struct, frozen=True):
    """One lane boundary."""

    confidence: Annotated[float, Meta(ge=0, le=1)]
    image_points: ImagePoints


class FrameTime(msgspec.Struct, frozen=True):
    """When the frame was captured, and how old it was when the message was made."""

    capture_mono_ns: _Int64
    capture_epoch_ns: _Int64
    capture_time: _Rfc3339
    age_us: _Count


class StageLatency(msgspec.Struct, frozen=True):
    """Where the time of the frame went, in microseconds; the whole is time.age_us."""

    queue: _Count
    preprocess: _Count
    infer: _Count
    postprocess: _Count


class ImageSize(msgspec.Struct, frozen=True):
    """Of the original frame, in pixels."""

    width: _Count
    height: _Count


class ModelVersion(msgspec.Struct, frozen=True):
    """The model that answered."""

    name: str
    version: str


class LaneFrame(msgspec.Struct, frozen=True):
    """The lanes of one camera frame; readers ignore fields that they do not know."""

    schema: Literal["edge.lanes/1"]
    device: str
    camera: str
    boot_id: str
    frame_id: _Count
    seq: _Count
    dropped: _Count
    status: FrameStatus
    reasons: list[str]
    time: FrameTime
    latency_us: StageLatency
    image: ImageSize
    model: ModelVersion
    lanes: list[Lane]
