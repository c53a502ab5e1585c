"""Inputs and outputs of a plan, read from its side-car or from TensorRT itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edge_server.backends.tensorrt.build.profiles import Range
from edge_server.backends.tensorrt.build.side_car import PlanTensor  # noqa: TC001 - read by msgspec
from edge_server.tensors import DataType

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


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
