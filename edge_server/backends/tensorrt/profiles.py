"""Choose the optimisation profile of a batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.tensorrt.build.profiles import Range
    from edge_server.backends.tensorrt.plan_io import PlanIO, Shapes

log = logging.getLogger(__name__)


class ProfileChoice:
    """The profiles that one instance may use.

    Args:
        instance: its name, for errors.
    """

    def __init__(self, io: PlanIO, allowed: Sequence[int], instance: str) -> None:
        self._ranges = [(index, io.ranges(index)) for index in allowed]
        self._instance = instance

    def of(self, sizes: Shapes) -> int:
        """Return the profile whose optimal shapes are nearest to `sizes`, by the sum of the
        differences; the first of equally near profiles.

        Args:
            sizes: input → shape, or the values of an input that holds a shape.

        Raises:
            InvalidRequest: no profile accepts `sizes`; the text gives the first profile's range.
        """
        fitting = [
            (_distance(ranges, sizes), index)
            for index, ranges in self._ranges
            if _misfit(ranges, sizes) is None
        ]
        if fitting:
            return min(fitting)[1]
        if len(self._ranges) > 1:
            log.warning(
                "failed to find any Optimization Profile among [ %s] to support the requested "
                "dimensions (or shape values), proceeding with first profile.",
                "".join(f"{index} " for index, _ in self._ranges),
            )
        name, why = _misfit(self._ranges[0][1], sizes) or ("", "")
        raise InvalidRequest(
            f"request specifies invalid shape for input '{name}' for {self._instance}. Error "
            f"details: model expected {why}"
        )


def _distance(ranges: Mapping[str, Range], sizes: Shapes) -> int:
    return sum(
        abs(size - best)
        for name, found in ranges.items()
        for size, best in zip(sizes.get(name, found.opt), found.opt, strict=False)
    )


def _misfit(ranges: Mapping[str, Range], sizes: Shapes) -> tuple[str, str] | None:
    """Return the first input that does not fit, and the reason; None where all fit."""
    for name, found in ranges.items():
        shape = sizes.get(name, found.opt)
        if len(shape) != len(found.opt):
            return name, f"{len(found.opt)} dimensions but received {len(shape)}"
        for at, (size, least, most) in enumerate(zip(shape, found.min, found.max, strict=True)):
            if not least <= size <= most:
                return name, (
                    f"the shape of dimension {at} to be between {least} and {most} but received "
                    f"{size}"
                )
    return None
