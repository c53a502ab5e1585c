"""Tables and numbers as text, for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNKNOWN = "-"


def table(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,)) -> list[str]:
    """Return the rows in columns, the first row the head; numbers are put to the right.

    Args:
        rows: cells, as many in each.
        left: the columns that begin at their left edge.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_left = set(left)
    return [
        "  ".join(
            cell.ljust(width) if column in to_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def number(value: float | None, decimals: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def size_text(size_bytes: float) -> str:
    """Return a size like `1.5 GiB`."""
    size, units = float(size_bytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units, like `2 h 5 min`."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
