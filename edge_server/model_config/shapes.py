"""Merging of two declarations of one shape, where -1 is any size."""

from __future__ import annotations


def unified(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that satisfies both, a fixed size before -1; None where they disagree."""
    if len(a) != len(b) or any(-1 not in (x, y) and x != y for x, y in zip(a, b, strict=True)):
        return None
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))
