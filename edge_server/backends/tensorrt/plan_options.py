"""A plan as it was asked for, and as it was built.

`BuildOptions` come from the model's configuration or the command line, with the shapes that the
plan shall accept. The side-car, `model.plan.json`, has the build's inputs, options and device. The
daemon reads it before TensorRT reads the plan: a plan of another TensorRT version or GPU fails to
load, and a plan without a side-car is native code of unknown origin.
"""

from __future__ import annotations

import ctypes
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from edge_server.board.board import read_l4t
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.files import reading
from edge_server.process.disk import file_sha256
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from edge_server.gpu.device import BareGpu
    from edge_server.model_config.config import ModelConfig

Precision = Literal["fp32", "fp16", "int8"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

# TensorRT's default is all of the GPU's memory, which on a Jetson is also the daemon's.
WORKSPACE_MIB = 1024


@dataclass(frozen=True)
class GivenShapes:
    """One optimisation profile, as far as it is given: input → shape, or the values of an input
    that holds a shape."""

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
        profiles: if empty, one profile accepts every shape that the configuration allows.
        dla_core: the NVDLA core to build for; None is the GPU.
        gpu_fallback, max_gpu_layers: layers that NVDLA does not support may run on the GPU, at most
            so many; None is unlimited.
        workspace_mib: memory that a layer may use beside its tensors.
        calibration: a directory of samples for INT8, or empty."""

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
    """Return the build options in `config`: its shapes, its NVDLA core
    (`instance_group.secondary_devices` of kind KIND_NVDLA), and its parameters `plan_precision`
    (fp32, fp16, int8), `plan_strongly_typed`, `plan_min`, `plan_opt`, `plan_max`
    (`input:1x3x360x640,other:4`; with a `;` between profiles), `plan_workspace_mib` and
    `plan_max_gpu_layers`."""
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


# From here on networks have the types of their ONNX file, and no flag adds FP16 to them.
TYPED_SINCE = (11, 0)
# In the metadata of a network in another precision: the SHA-256 of the file that it was made of.
MADE_OF = "made_of"


def network_of(
    onnx: Path, options: BuildOptions, version: tuple[int, int]
) -> tuple[Path, BuildOptions]:
    """Return the ONNX file that a plan of `options` is built of, and the options to build it with.

    A precision that TensorRT of that version does not make of the network `onnx` itself may be
    delivered beside it: `model_int8.onnx` has Q/DQ nodes, and `model_fp16.onnx` the types for
    TensorRT 11. Raises ModelConfigError where that file says that it was made of another
    network."""
    beside = precision_file(onnx, options.precision)
    by_file = not options.calibration if options.precision == "int8" else version >= TYPED_SINCE
    if options.precision == "fp32" or not by_file or not beside.is_file():
        return onnx, options
    with reading(beside):
        _, said, value = beside.read_bytes().rpartition(MADE_OF.encode())
    if said and onnx.is_file() and sha256_of(onnx).encode() not in value:
        raise ModelConfigError(
            f"{beside}: was made of another {onnx.name} than is there; make it again "
            "(training/reduce_precision.py makes it of the lane network), or remove it"
        )
    typed = replace(options, precision="fp32", strongly_typed=True)
    return beside, options if options.precision == "int8" else typed


def precision_file(onnx: Path, precision: Precision) -> Path:
    return onnx.with_name(f"{onnx.stem}_{precision}{onnx.suffix}")


def given_profiles(
    least: Sequence[str], best: Sequence[str], most: Sequence[str]
) -> tuple[GivenShapes, ...]:
    count = max(len(least), len(best), len(most))
    texts = ([*texts, *[""] * (count - len(texts))] for texts in (least, best, most))
    given = (GivenShapes(*map(shapes, three)) for three in zip(*texts, strict=True))
    return tuple(each for each in given if each != GivenShapes())


def shapes(text: str) -> Shapes:
    """Parse `input:1x3x360x640,other:4`, trtexec's form; names are not resolved yet."""
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
class Range:
    """The range of one input's shape in one profile; the plan is fastest at `opt`."""

    min: Shape
    opt: Shape
    max: Shape


Profile = Mapping[str, Range]


def profiles_for(inputs: Sequence[PlanTensor], options: BuildOptions) -> tuple[Profile, ...]:
    """Return a range for every input that has a free dimension or holds a shape; empty without such
    inputs. A missing shape comes from the configuration: a batch from 1 to `max_batch_size`, where
    it is fastest, other dimensions from its dims. A range given in part is filled with its given
    sizes."""
    _check_names(inputs, options)
    free = [i for i in inputs if i.holds_shape or -1 in i.shape]
    requested = options.profiles or (GivenShapes(),)
    profiles = tuple({i.name: _range(i, given, options) for i in free} for given in requested)
    if options.dla_core is not None:
        _check_fixed(profiles)
    return profiles if free else ()


def _check_names(inputs: Sequence[PlanTensor], options: BuildOptions) -> None:
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


def _range(wanted: PlanTensor, given: GivenShapes, options: BuildOptions) -> Range:
    least, best, most = (s.get(wanted.name) for s in (given.min, given.opt, given.max))
    most = most or best or least
    if most is None:
        least, most = _from_configuration(wanted, options)
    best = best or most
    found = Range(least or best, best, most)
    _check(wanted, found)
    return found


def _from_configuration(wanted: PlanTensor, options: BuildOptions) -> tuple[Shape, Shape]:
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


def _check(wanted: PlanTensor, found: Range) -> None:
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


# TensorRT's names of a tensor's copies between the GPU and NVDLA: `input to nvm`.
_TO_AND_FROM_DLA = (" to nvm", " from nvm", " copy finish")


@dataclass(frozen=True)
class Placed:
    """Placement of an engine's layers: the parts that run on NVDLA, each as one loadable, the
    layers on the GPU, and the number of layout changes at the borders between both."""

    dla: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    reformats: int = 0

    def __str__(self) -> str:
        return (
            f"{_count(len(self.dla), 'part')} on NVDLA, {_count(len(self.gpu), 'layer')} on the "
            f"GPU, {_count(self.reformats, 'change')} of layout"
        )


def placed(information: str) -> Placed:
    """Parse the placement from the JSON of `get_engine_information`, in which every field may be
    missing, and layers are bare names but for a plan that was built with detailed verbosity."""
    dla: list[str] = []
    gpu: list[str] = []
    reformats = 0
    for layer in _layers(information):
        name, kind = _name_and_kind(layer)
        if kind.upper() == "DLA":
            dla.append(name)
        elif (
            kind.lower() in ("reformat", "noop")
            or name.startswith("Reformatting CopyNode")
            or name.endswith(_TO_AND_FROM_DLA)
        ):
            reformats += 1
        else:
            gpu.append(name)
    return Placed(tuple(dla), tuple(gpu), reformats)


def io_names(information: str) -> tuple[str, ...]:
    """Return the engine's own tensors: `Bindings`, or `I/O Tensors` in TensorRT 11's spelling."""
    parsed = _object(information)
    found = parsed.get("I/O Tensors", parsed.get("Bindings", []))
    if not isinstance(found, list):
        return ()
    names = (entry.get("Name", "") if isinstance(entry, dict) else entry for entry in found)
    return tuple(name for name in names if isinstance(name, str) and name)


def layer_table(information: str) -> list[str]:
    pairs = [_name_and_kind(layer) for layer in _layers(information)]
    width = max((len(kind) for _, kind in pairs), default=0)
    return [f"{kind:{width}}  {name}" for name, kind in pairs]


def _layers(information: str) -> list[Any]:
    found = _object(information).get("Layers", [])
    return found if isinstance(found, list) else []


def _object(information: str) -> dict[str, Any]:
    try:
        parsed = json.loads(information)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _name_and_kind(layer: Any) -> tuple[str, str]:
    if isinstance(layer, dict):
        return str(layer.get("Name", "")), str(layer.get("LayerType", ""))
    return str(layer), ""


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


FORMAT = 2
# TensorRT's names of types that differ from the protocol's.
_DATATYPES = {"FLOAT": "FP32", "HALF": "FP16"}


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of one device; empty or 0 for a missing part, or an unknown fact.

    Attributes:
        multiprocessors: of the GPU: Orin modules of one name differ in their number.
        l4t: Jetson Linux's release: `36.4.7`.
        reason: why the GPU or TensorRT is missing; empty if both are present."""

    tensorrt: str = ""
    compute_capability: str = ""
    gpu: str = ""
    multiprocessors: int = 0
    l4t: str = ""
    dla_cores: int = 0
    reason: str = ""

    @property
    def sm(self) -> str:
        return f"sm_{self.compute_capability.replace('.', '')}" if self.compute_capability else ""

    @property
    def version(self) -> tuple[int, int]:
        return version_of(self.tensorrt)


def full_version(reported: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Return TensorRT's version with the build number, which TensorRT compares in plans too, and
    which the bindings' version may leave out: `10.3.0`. `load` opens a library by its name."""
    if reported.count(".") != 2:
        return reported
    try:
        # The bindings' own library: the loader never loads a second one of that name.
        library = load(f"libnvinfer.so.{reported.split('.', maxsplit=1)[0]}")
        return f"{reported}.{library.getInferLibBuildVersion()}"
    except (OSError, AttributeError):
        # TensorRT 8 lacks this function.
        return reported


def version_of(text: str) -> tuple[int, int]:
    numbers = [int(part) for part in text.split(".")[:2] if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def device_facts(gpu: BareGpu | None, tensorrt: str, dla_cores: int, reason: str) -> DeviceFacts:
    """Return the facts of this device, with TensorRT's version as its bindings report it."""
    return DeviceFacts(
        tensorrt=full_version(tensorrt),
        compute_capability=gpu.compute_capability if gpu else "",
        gpu=gpu.name if gpu else "",
        multiprocessors=gpu.multiprocessors if gpu else 0,
        l4t=str(read_l4t(Path("/")) or ""),
        dla_cores=dla_cores,
        reason=reason,
    )


def datatype_name(name: str) -> str:
    """Return the protocol's name of TensorRT's type `name`; `name` itself if the protocol lacks
    it."""
    return _DATATYPES.get(name, name)


@dataclass(frozen=True)
class PlanTensor:
    """One input or output of a plan.

    Attributes:
        datatype: the protocol's name, or TensorRT's if the protocol lacks the type.
        shape: -1 where a profile bounds it, or where it depends on the data.
        format: TensorRT's memory layout; empty where only the device determines it.
        holds_shape: its values are sizes, and it lies on the host."""

    name: str
    is_input: bool
    datatype: str
    shape: tuple[int, ...]
    format: str = ""
    holds_shape: bool = False


@dataclass(frozen=True)
class SideCar:
    """The content of `model.plan.json`.

    Attributes:
        options: the digest of its `BuildOptions`.
        precision: formats that layers may calculate in; `as the ONNX file` of a typed network.
        dla_core: the requested core, though the plan runs on any; None is the GPU alone.
        placed: the placement of its layers; None where the build had no device to read it from.
        trtexec: the equivalent command line."""

    onnx_sha256: str
    plan_sha256: str
    options: str
    built_with: DeviceFacts
    precision: str
    dla_core: int | None
    profiles: tuple[Mapping[str, Range], ...]
    tensors: tuple[PlanTensor, ...]
    placed: Placed | None = None
    trtexec: str = ""
    build_s: float = 0.0
    format: int = field(default=FORMAT)


def side_car_path(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.json")


def read_side_car(plan: Path) -> SideCar | None:
    """Read the side-car beside `plan`; None if the file does not exist."""
    path = side_car_path(plan)
    with reading(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        found = msgspec.json.decode(data, type=SideCar)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(
            f"{path}: is no side-car of a plan: {error}; build the plan again"
        ) from error
    if found.format != FORMAT:
        raise ModelConfigError(
            f"{path}: is of format {found.format}, this edge-server knows {FORMAT}; build the plan "
            "again"
        )
    return found


def encode(side_car: SideCar) -> bytes:
    return msgspec.json.format(msgspec.json.encode(side_car), indent=2) + b"\n"


def compare(side_car: SideCar, facts: DeviceFacts, model: str) -> list[str]:
    """Return the reasons why a plan cannot run on the device of `facts`, each with the remedy.
    TensorRT's full version and the GPU's architecture must match, as TensorRT itself demands; for
    NVDLA, whose loadables depend on its firmware, Jetson Linux (36.4.7) too, where both are
    known."""
    built = side_car.built_with
    remedy = f"run `edge-server plan build {model}`"
    theirs, ours = _shortest(built.tensorrt, facts.tensorrt)
    reasons = []
    if (built.tensorrt, built.sm) != (facts.tensorrt, facts.sm):
        reasons.append(
            f"built with TensorRT {theirs or 'none'} for {built.sm or 'no GPU'}, this device has "
            f"TensorRT {ours or 'none'} and {facts.sm or 'no GPU'}; {remedy}"
        )
    if side_car.dla_core is not None and _is_other_l4t(built, facts):
        reasons.append(f"built on Jetson Linux {built.l4t}, this device has {facts.l4t}; {remedy}")
    if side_car.dla_core is not None and not facts.dla_cores:
        reasons.append(
            f"built for NVDLA, of which this device has none with TensorRT {ours or 'none'}; take "
            f"secondary_devices out of the model's instance_group, and {remedy}"
        )
    return reasons


def cautions(side_car: SideCar, facts: DeviceFacts, model: str) -> list[str]:
    """Return the differences between the plan's device and `facts` that may slow the plan down.

    A power mode of nvpmodel may disable multiprocessors, and an update may bring another Jetson
    Linux with the same TensorRT: TensorRT runs such plans, and a vehicle must not stop for them.
    """
    built = side_car.built_with
    found = []
    if built.multiprocessors != facts.multiprocessors:
        found.append(
            f"built for {built.multiprocessors} multiprocessors of {built.gpu}, this device has "
            f"{facts.multiprocessors} of {facts.gpu}: another module, or another power mode"
        )
    if side_car.dla_core is None and _is_other_l4t(built, facts):
        found.append(f"built on Jetson Linux {built.l4t}, this device has {facts.l4t}")
    return [f"{each}; for the best speed run `edge-server plan build {model}`" for each in found]


def _is_other_l4t(built: DeviceFacts, facts: DeviceFacts) -> bool:
    # A container often cannot see the release.
    return bool(built.l4t and facts.l4t) and built.l4t != facts.l4t


def side_car_faults(
    side_car: SideCar, plan: Path, onnx: Path | None, facts: DeviceFacts, model: str
) -> list[str]:
    """Return the reasons why `plan` cannot run on the device of `facts`, does not belong to
    `side_car`, or was not built from `onnx`, if that was delivered, each with the remedy."""
    reasons = compare(side_car, facts, model)
    if reasons:
        return reasons
    remedy = f"run `edge-server plan build {model}`"
    if sha256_of(plan) != side_car.plan_sha256:
        reasons.append(
            f"{plan.name} is not the file that {side_car_path(plan).name} speaks of; {remedy}"
        )
    if onnx is not None and sha256_of(onnx) != side_car.onnx_sha256:
        reasons.append(f"{plan.name} was built of another {onnx.name} than is there; {remedy}")
    return reasons


def plan_faults(plan: Path, onnx: Path | None, facts: DeviceFacts, model: str) -> list[str]:
    side_car = read_side_car(plan)
    if side_car is None:
        return [
            f"{plan.name} has no {side_car_path(plan).name} beside it, so it is unknown what it "
            f"was built of and for; run `edge-server plan build {model}`"
        ]
    return side_car_faults(side_car, plan, onnx, facts, model)


def sha256_of(path: Path) -> str:
    with reading(path):
        return file_sha256(path)


def _shortest(one: str, other: str) -> tuple[str, str]:
    """Return both versions in the shortest form in which they differ: 10.3 and 10.16, but
    10.3.0.26 and 10.3.0.30."""
    if one.split(".")[:2] == other.split(".")[:2] and one != other:
        return one, other
    return ".".join(one.split(".")[:2]), ".".join(other.split(".")[:2])
