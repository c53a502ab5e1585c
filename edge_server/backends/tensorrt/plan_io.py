"""Inputs, outputs and profiles of a plan, read from its side-car or from TensorRT itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping  # noqa: TC003 - read by msgspec
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edge_server.backends.tensorrt.plan_build.profiles import Range
from edge_server.backends.tensorrt.plan_build.side_car import PlanTensor  # noqa: TC001 - read by msgspec
from edge_server.errors import InvalidRequest
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from edge_server.backends.tensorrt.plan_build.build_options import Shapes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanIO:
    """The tensors of a plan in its order, and the ranges of its optimisation profiles.

    Attributes:
        profiles: input → its range, of each profile; only inputs with a free dimension, and those
            that hold a shape, whose values the range bounds.
    """

    tensors: tuple[PlanTensor, ...]
    profiles: tuple[Mapping[str, Range], ...] = ()

    @cached_property
    def inputs(self) -> tuple[PlanTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.is_input)

    @cached_property
    def outputs(self) -> tuple[PlanTensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_input)

    @property
    def profile_count(self) -> int:
        """The number of profiles; a plan of fixed shapes has one empty profile."""
        return max(1, len(self.profiles))

    @property
    def is_fixed(self) -> bool:
        """Whether every input, and therefore every output, has a single shape."""
        return not any(-1 in t.shape or t.holds_shape for t in self.tensors)

    def ranges(self, profile: int) -> Mapping[str, Range]:
        return self.profiles[profile] if self.profiles else {}

    def bounds(self, tensor: PlanTensor, profile: int) -> Range:
        """Return the input's range of shapes in `profile`; for a fixed shape all three are
        equal."""
        found = self.ranges(profile).get(tensor.name)
        if found is None or tensor.holds_shape:
            return Range(tensor.shape, tensor.shape, tensor.shape)
        return found


def datatype_of(tensor: PlanTensor) -> DataType | None:
    """Return the tensor's type; None if the protocol lacks it."""
    try:
        return DataType(tensor.datatype)
    except ValueError:
        return None


def numpy_of(tensor: PlanTensor) -> np.dtype[Any]:
    """Return the numpy type of a tensor whose type the protocol has."""
    datatype = datatype_of(tensor)
    assert datatype is not None  # noqa: S101 - the configuration was checked against the plan
    return datatype.numpy


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
