"""Options of a plan's build, from the model's configuration or the command line."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edge_server.model_config.config import ModelConfig

Precision = Literal["fp32", "fp16", "int8"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

# TensorRT's default is all of the GPU's memory, which on a Jetson is also the daemon's.
WORKSPACE_MIB = 1024


@dataclass(frozen=True)
class GivenShapes:
    """One optimisation profile, as far as it is given: input → shape.

    For an input that holds a shape, its values take the place of its own shape.
    """

    min: Shapes = field(default_factory=dict)
    opt: Shapes = field(default_factory=dict)
    max: Shapes = field(default_factory=dict)


@dataclass(frozen=True)
class BuildOptions:
    """All options that determine the plan of an ONNX file, except for the device.

    Attributes:
        precision: `fp16` lets layers calculate in FP16, `int8` in INT8 and FP16. A strongly typed
            network, as every network from TensorRT 11 on, calculates in the types of its ONNX file.
        strongly_typed: on TensorRT 10; 11 has no other mode, 8 lacks it.
        max_batch_size: the model's; 0 where its shapes have no batch dimension.
        dims: input → its dims in the configuration, with -1 for the batch if the model batches.
        profiles: the given shapes of each optimisation profile; if empty, one profile accepts every
            shape that the configuration allows.
        dla_core: the NVDLA core to build for; None is the GPU.
        gpu_fallback: layers that NVDLA does not support may run on the GPU.
        max_gpu_layers: maximum number of such layers; None is unlimited.
        workspace_mib: memory that a layer may use beside its tensors, during the build and at run
            time.
        calibration: a directory of samples for INT8, or empty.
    """

    precision: Precision = "fp32"
    strongly_typed: bool = False
    max_batch_size: int = 0
    dims: Shapes = field(default_factory=dict)
    profiles: tuple[GivenShapes, ...] = ()
    dla_core: int | None = None
    gpu_fallback: bool = True
    max_gpu_layers: int | None = None
    workspace_mib: int = WORKSPACE_MIB
    calibration: str = ""

    @property
    def digest(self) -> str:
        """Options of equal digest are equal."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


def build_options_of(config: ModelConfig) -> BuildOptions:
    """Return the build options in `config`: its shapes, its NVDLA core, and its parameters
    `plan_…`.

    `instance_group.secondary_devices` of kind KIND_NVDLA names cores. The parameters are
    `plan_precision` (fp32, fp16, int8), `plan_strongly_typed`, `plan_min`, `plan_opt`, `plan_max`
    (`input:1x3x360x640,other:4`; with a `;` between profiles), `plan_workspace_mib` and
    `plan_max_gpu_layers`.

    Raises:
        ModelConfigError: a parameter is invalid; the text names it.
    """
    parameters = config.parameters
    cores = [g.dla_core for g in config.instance_groups if g.dla_core is not None]
    try:
        return BuildOptions(
            precision=precision(parameters.get("plan_precision", "fp32")),
            strongly_typed=_flag(parameters, "plan_strongly_typed"),
            max_batch_size=config.max_batch_size,
            dims={
                spec.name: (-1, *config.model_shape(spec))
                if config.max_batch_size
                else config.model_shape(spec)
                for spec in config.inputs
            },
            profiles=given_profiles(
                *(parameters.get(f"plan_{which}", "").split(";") for which in ("min", "opt", "max"))
            ),
            # A plan for one NVDLA core runs on each.
            dla_core=min(cores, default=None),
            max_gpu_layers=_number(parameters, "plan_max_gpu_layers"),
            workspace_mib=_number(parameters, "plan_workspace_mib") or WORKSPACE_MIB,
        )
    except InvalidRequest as error:
        raise ModelConfigError(f"model '{config.name}': parameters: {error}") from error


def given_profiles(
    least: Sequence[str], best: Sequence[str], most: Sequence[str]
) -> tuple[GivenShapes, ...]:
    """Return the given profiles; the first text of each argument belongs to the first profile, the
    second to the second.

    Raises:
        InvalidRequest: one of the texts is no list of shapes.
    """
    count = max(len(least), len(best), len(most))
    texts = ([*texts, *[""] * (count - len(texts))] for texts in (least, best, most))
    given = (GivenShapes(*map(shapes, three)) for three in zip(*texts, strict=True))
    return tuple(each for each in given if each != GivenShapes())


def shapes(text: str) -> Shapes:
    """Parse `input:1x3x360x640,other:4`, trtexec's form; names are not resolved yet.

    Raises:
        InvalidRequest: the text has another form.
    """
    found: dict[str, Shape] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        # A tensor's name may itself contain a colon.
        name, colon, sizes = part.rpartition(":")
        numbers = sizes.split("x")
        if not colon or not name or not all(number.isdecimal() for number in numbers):
            raise InvalidRequest(
                f"'{part}' is no shape; give NAME:DIMxDIM, like 'input:1x3x360x640', with commas "
                "between several"
            )
        if name in found:
            raise InvalidRequest(f"'{text}' gives the shape of '{name}' twice")
        found[name] = tuple(map(int, numbers))
    return found


def precision(text: str) -> Precision:
    """Parse a precision.

    Raises:
        InvalidRequest: the precision does not exist.
    """
    for known in get_args(Precision):
        if text.strip().lower() == known:
            found: Precision = known
            return found
    raise InvalidRequest(f"precision '{text}' is unknown; known: {', '.join(get_args(Precision))}")


def _flag(parameters: Mapping[str, str], name: str) -> bool:
    text = parameters.get(name, "false").strip().lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"'{name}' is '{text}'; give true or false")
    return text in ("true", "1")


def _number(parameters: Mapping[str, str], name: str) -> int | None:
    text = parameters.get(name, "").strip()
    if text and not text.isdecimal():
        raise InvalidRequest(f"'{name}' is '{text}'; give a whole number")
    return int(text) if text else None


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
