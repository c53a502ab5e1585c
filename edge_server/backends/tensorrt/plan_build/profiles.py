"""Optimisation profiles: the shapes that a plan accepts, from the given shapes and the network's
inputs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.plan_build.build_options import BuildOptions, GivenShapes, Shape
from edge_server.errors import InvalidRequest
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class NetworkInput:
    """One input of a parsed network.

    Attributes:
        shape: -1 where any size is allowed.
        holds_shape: its values are sizes; a profile then bounds the values.
    """

    name: str
    shape: Shape
    holds_shape: bool = False


@dataclass(frozen=True)
class Range:
    """The range of one input's shape in one profile; the plan is fastest at `opt`."""

    min: Shape
    opt: Shape
    max: Shape


Profile = Mapping[str, Range]


def profiles_for(inputs: Sequence[NetworkInput], options: BuildOptions) -> tuple[Profile, ...]:
    """Return a range for every input that has a free dimension or holds a shape; empty without such
    inputs.

    A missing shape comes from the configuration: a batch from 1 to the model's `max_batch_size`,
    optimal at the maximum, other dimensions from its dims. A range given in part is filled with its
    given sizes.

    Raises:
        InvalidRequest: a size is neither given nor known, or is invalid; the text names the input
            and the option to give.
    """
    _check_names(inputs, options)
    free = [i for i in inputs if i.holds_shape or -1 in i.shape]
    requested = options.profiles or (GivenShapes(),)
    profiles = tuple({i.name: _range(i, given, options) for i in free} for given in requested)
    if options.dla_core is not None:
        _check_fixed(profiles)
    return profiles if free else ()


def _check_names(inputs: Sequence[NetworkInput], options: BuildOptions) -> None:
    names = [i.name for i in inputs]
    for name in _named(options.profiles):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InvalidRequest(
                f"the network has no input '{name}', only {', '.join(names) or 'none'}{hint}"
            )


def _named(profiles: Iterable[GivenShapes]) -> Iterable[str]:
    for given in profiles:
        for shapes in (given.min, given.opt, given.max):
            yield from shapes


def _range(wanted: NetworkInput, given: GivenShapes, options: BuildOptions) -> Range:
    least, best, most = (s.get(wanted.name) for s in (given.min, given.opt, given.max))
    most = most or best or least
    if most is None:
        least, most = _from_configuration(wanted, options)
    best = best or most
    found = Range(least or best, best, most)
    _check(wanted, found)
    return found


def _from_configuration(wanted: NetworkInput, options: BuildOptions) -> tuple[Shape, Shape]:
    dims = options.dims.get(wanted.name, ())
    if not wanted.holds_shape and len(dims) == len(wanted.shape):
        merged = tuple(d if n == -1 else n for n, d in zip(wanted.shape, dims, strict=True))
        if options.max_batch_size and merged[:1] == (-1,):
            least, most = (1, *merged[1:]), (options.max_batch_size, *merged[1:])
            if -1 not in merged[1:]:
                return least, most
        elif -1 not in merged:
            return merged, merged
    example = "x".join(str(d if d > 0 else 1) for d in wanted.shape)
    what = "holds a shape" if wanted.holds_shape else f"has shape {shape_text(wanted.shape)}"
    raise InvalidRequest(
        f"input '{wanted.name}' {what}, and its sizes are given nowhere: give "
        f"--opt {wanted.name}:{example}, and --min and --max where it varies"
    )


def _check(wanted: NetworkInput, found: Range) -> None:
    for which, shape in (("min", found.min), ("opt", found.opt), ("max", found.max)):
        rank = len(found.opt) if wanted.holds_shape else len(wanted.shape)
        if len(shape) != rank:
            raise InvalidRequest(
                f"input '{wanted.name}' has {rank} dimensions, --{which} gives {len(shape)}"
            )
        for at, (has, size) in enumerate(zip(wanted.shape, shape, strict=False)):
            if not wanted.holds_shape and has not in (-1, size):
                raise InvalidRequest(
                    f"input '{wanted.name}' has {has} in dimension {at}, --{which} gives {size}"
                )
    for at, (least, best, most) in enumerate(zip(found.min, found.opt, found.max, strict=True)):
        if not least <= best <= most:
            raise InvalidRequest(
                f"input '{wanted.name}', dimension {at}: min {least}, opt {best} and max {most} "
                "are not in that order"
            )


def _check_fixed(profiles: Iterable[Profile]) -> None:
    for profile in profiles:
        for name, found in profile.items():
            if not found.min == found.opt == found.max:
                raise InvalidRequest(
                    f"input '{name}' varies from {shape_text(found.min)} to "
                    f"{shape_text(found.max)}, and NVDLA takes fixed shapes only: give one with "
                    "--opt, or build for the GPU"
                )
