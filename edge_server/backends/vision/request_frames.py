"""The frames of a request: their pixel format, colours and size, from its shape and parameters."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from edge_server.pixels import Colour, ColourMatrix, ColourRange, Image, PixelFormat
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edge_server.requests import Parameters

# The configuration's word for a model that takes frames of each format.
ANY = "any"

# The values per element of a packed array's last axis, and the format of an array that no parameter
# describes.
_CHANNELS = {PixelFormat.BGR: 3, PixelFormat.YUY2: 2}
_BY_CHANNELS = {3: PixelFormat.BGR, 2: PixelFormat.YUY2, 1: PixelFormat.GREY}

_Choice = TypeVar("_Choice", bound=Enum)


class RequestFrames(NamedTuple):
    """The frames of one request, all alike; their size is in px, whatever the array's shape."""

    frame_count: int
    pixel_format: PixelFormat
    colour: Colour
    height: int
    width: int

    def image(self, pixels: NDArray[np.uint8]) -> Image:
        """Return one frame's array as an image, which is not copied."""
        return Image.of_packed(
            self.pixel_format, pixels if pixels.ndim == 3 else pixels[..., None], self.colour
        )


def frames_of_request(
    dims: tuple[int, ...],
    parameters: Parameters,
    only: PixelFormat | None,
    default: Colour,
    frame_count: int,
) -> RequestFrames:
    """Return the frames that a request describes.

    Its parameters are `pixel_format`, `color_matrix` and `color_range`; each may be absent. The
    colours have no effect on BGR.

    Args:
        dims: of one frame's array, two or three.
        only: the only pixel format that the model takes; None for any.
        default: colours where the parameters do not name them.
        frame_count: the number of frames.

    Raises:
        ValueError: a parameter is invalid, or contradicts the shape or the model; the text names
            the remedy.
    """
    colour = Colour(
        choice(ColourMatrix, "color_matrix", parameters.get("color_matrix", default.matrix.value)),
        choice(ColourRange, "color_range", parameters.get("color_range", default.range.value)),
    )
    named: PixelFormat | None = None
    if (text := parameters.get("pixel_format")) is not None:
        named = choice(PixelFormat, "pixel_format", text)
    if only is not None and named not in (None, only):
        raise ValueError(
            f"parameter 'pixel_format' is '{text}', the model takes {only.value}; send "
            f'{only.value} frames, or give the model pixel_format "{ANY}" and dims [-1,-1,-1]'
        )
    channels = dims[2] if len(dims) == 3 else 1
    pixel_format = only or named or _BY_CHANNELS.get(channels)
    if pixel_format is None:
        raise ValueError(
            "the last of the dims is 3 for bgr, 2 for yuy2, 1 for grey, nv12 and i420 (parameter "
            "'pixel_format')"
        )
    wanted = _CHANNELS.get(pixel_format, 1)
    if channels != wanted:
        raise ValueError(
            f"parameter 'pixel_format' is '{pixel_format.value}', whose frames have {wanted} as "
            f"the last of the dims, not {shape_text(dims)}; send such a frame, or leave "
            "'pixel_format' out for bgr, yuy2 and grey"
        )
    rows, width = dims[:2]
    if not pixel_format.is_subsampled:
        return RequestFrames(frame_count, pixel_format, colour, rows, width)
    if rows % 3:
        raise ValueError(
            f"the {pixel_format.value} frame has H rows of luma and then H/2 of chroma, H even"
        )
    return RequestFrames(frame_count, pixel_format, colour, rows // 3 * 2, width)


def choice(of: type[_Choice], name: str, value: object, *more: str) -> _Choice:
    """Return the member of `of` with that value.

    Raises:
        ValueError: there is none; the text lists those that there are, and `more`.
    """
    for each in of:
        if each.value == value:
            return each
    known = ", ".join([str(each.value) for each in of] + list(more))
    raise ValueError(f"parameter '{name}' is '{value}'; it is one of {known}")
