"""A capture time in a picture's pixels: black and white blocks that stay readable through a codec.

The code is a strip of `BITS` blocks along the upper edge, the lowest bit first, then the same bits
inverted in the strip below; a reader accepts it only where both strips agree. The blocks scale with
the picture. This module needs the standard library alone, as the camera's own Python has no numpy.
"""

from __future__ import annotations

BITS = 40
# One count is 100 µs: 40 bits are three years.
TICK_NS = 100_000
_BLACK, _WHITE = 16, 235


def rows_of_strip(height: int) -> int:
    """Return the height in px of one of the two strips."""
    return max(8, height // 45 // 2 * 2)


def strips(mono_ns: int, width: int) -> tuple[bytes, bytes]:
    """Return one row of luma of either strip, `width` bytes each, that says `mono_ns`."""
    ticks = mono_ns // TICK_NS
    block = width // BITS
    row = b"".join(bytes([_WHITE if ticks >> bit & 1 else _BLACK]) * block for bit in range(BITS))
    row += bytes([_BLACK]) * (width - len(row))
    return row, bytes(_WHITE + _BLACK - value for value in row)


def write_time(luma: memoryview | bytearray, width: int, height: int, mono_ns: int) -> None:
    """Write `mono_ns` into the first rows of a plane of luma without gaps."""
    rows = rows_of_strip(height)
    upper, lower = strips(mono_ns, width)
    luma[: 2 * rows * width] = upper * rows + lower * rows


def read_time(luma: object) -> int | None:
    """Return the CLOCK_MONOTONIC in ns that `luma`, (H, W) uint8, shows; None where its strips do
    not agree: no code, or a damaged one."""
    import numpy as np  # the camera's Python has none

    plane = np.asarray(luma)
    height, width = plane.shape
    rows, block = rows_of_strip(height), width // BITS
    columns = np.arange(BITS) * block + block // 2
    middles = [plane[rows // 2 + at, columns].astype(int) for at in (0, rows)]
    upper, lower = (middle > 127 for middle in middles)
    if not np.array_equal(upper, ~lower) or np.abs(middles[0] - middles[1]).min() < 60:
        return None
    return int(sum(1 << bit for bit in range(BITS) if upper[bit])) * TICK_NS
