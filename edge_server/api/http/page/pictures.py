"""A picture as the page gets it: the lanes as JSON, and the JPEG of the same frame."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from edge_server.pipeline.messages import lane_frame_fields

if TYPE_CHECKING:
    from edge_server.board.identity import Identity
    from edge_server.pipeline.picture_feed import Sight

_QUALITY = 78


class PictureWriter:
    """Writes pictures of the cameras; for one thread.

    Args:
        identity: of this device.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._seq = itertools.count()

    def __call__(self, sight: Sight, width: int) -> bytes:
        """Return the size of the JSON in four bytes, big endian, the JSON, and the JPEG.

        The JSON is a `LaneFrame` message, see docs/mqtt.md, without the ground points, whose
        polynomials it has. Its age is that of the moment at which the lanes were known.

        Args:
            sight: the frame and its lanes.
            width: a wider picture is made so small, in px.
        """
        # OpenCV comes with the first camera, and takes long to import.
        from edge_server.cameras.jpeg import jpeg_of  # noqa: PLC0415

        fields = lane_frame_fields(sight.lane_frame, self._identity, next(self._seq), sight.seen_ns)
        for lane in fields["lanes"]:
            if "ground" in lane:
                del lane["ground"]["points"]
        text = msgspec.json.encode(fields)
        return b"".join((len(text).to_bytes(4, "big"), text, jpeg_of(sight.frame, _QUALITY, width)))
