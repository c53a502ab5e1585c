"""Options of a plan's build, from the model's configuration or the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from edge_server.errors import InvalidRequest, ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
