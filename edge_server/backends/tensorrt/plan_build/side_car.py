"""Placement of an engine's layers, as TensorRT's inspector reports it."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the types
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.backends.tensorrt.plan_build.build_options import Range  # noqa: TC001 - msgspec
from edge_server.board.jetson import read_l4t
from edge_server.errors import ModelConfigError
from edge_server.model_config.files import reading
from edge_server.process.disk import file_sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.libcuda import BareGpu

# TensorRT's names of a tensor's copies between the GPU and NVDLA: `input to nvm`.
_TO_AND_FROM_DLA = (" to nvm", " from nvm", " copy finish")


@dataclass(frozen=True)
class Placed:
    """Placement of an engine's layers.

    Attributes:
        dla: one name for each part that runs on NVDLA, as one loadable.
        gpu: names of the layers on the GPU, without changes of layout.
        reformats: number of layout changes, which occur at the borders between NVDLA and GPU.
    """

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
    missing.

    Layers are objects if the plan was built with detailed verbosity, otherwise bare names.
    """
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
    """Return a line for each layer: its type and its name."""
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
        tensorrt: its full version: `10.3.0.30`.
        compute_capability: of the GPU: `8.7`.
        gpu: the driver's name of the GPU.
        multiprocessors: of the GPU: Orin modules of one name differ in their number.
        l4t: Jetson Linux's release: `36.4.7`.
        dla_cores: number of NVDLA cores that TensorRT reports.
        reason: why the GPU or TensorRT is missing; empty if both are present.
    """

    tensorrt: str = ""
    compute_capability: str = ""
    gpu: str = ""
    multiprocessors: int = 0
    l4t: str = ""
    dla_cores: int = 0
    reason: str = ""

    @property
    def sm(self) -> str:
        """`sm_87`, the compilers' spelling."""
        return f"sm_{self.compute_capability.replace('.', '')}" if self.compute_capability else ""

    @property
    def version(self) -> tuple[int, int]:
        """TensorRT's major and minor version; (0, 0) without TensorRT."""
        return version_of(self.tensorrt)


def full_version(reported: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Return TensorRT's version with the build number, which TensorRT compares in plans too.

    Args:
        reported: the bindings' version, which may leave the build number out: `10.3.0`.
        load: opens a library by its name.
    """
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
    """Return `10.3.0.30` as (10, 3)."""
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
        holds_shape: its values are sizes, and it lies on the host.
    """

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
        onnx_sha256: of the plan's ONNX file.
        options: the digest of its `BuildOptions`.
        precision: formats that layers may calculate in; of a strongly typed network, `as the ONNX
            file`.
        dla_core: the requested core; None is the GPU alone. The plan runs on any core.
        profiles: input → its range, for each profile.
        placed: the placement of its layers; None where the build had no device to read it from.
        trtexec: the equivalent command line.
        build_s: duration of the build.
    """

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
    """`model.plan.json` beside `model.plan`."""
    return plan.with_name(f"{plan.name}.json")


def read_side_car(plan: Path) -> SideCar | None:
    """Read the side-car beside `plan`; None if the file does not exist.

    Raises:
        ModelConfigError: the file cannot be read, or is no side-car.
    """
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
    """Encode the side-car as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(side_car), indent=2) + b"\n"


def compare(side_car: SideCar, facts: DeviceFacts, model: str) -> list[str]:
    """Return the reasons why a plan cannot run on the device of `facts`, each with the remedy; an
    empty list if it can.

    TensorRT's full version and the GPU's architecture must match, as TensorRT itself demands; for
    NVDLA, whose loadables depend on its firmware, Jetson Linux (36.4.7) must match too, where both
    are known.
    """
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
    `side_car`, or was not built from `onnx`, each with the remedy; an empty list if all is well.

    Args:
        onnx: None where only the plan was delivered.

    Raises:
        ModelConfigError: one of the files cannot be read.
    """
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
    """Return the reasons of `side_car_faults`, or that `plan` has no side-car.

    Raises:
        ModelConfigError: a file cannot be read.
    """
    side_car = read_side_car(plan)
    if side_car is None:
        return [
            f"{plan.name} has no {side_car_path(plan).name} beside it, so nobody knows what it was "
            f"built of and for; run `edge-server plan build {model}`"
        ]
    return side_car_faults(side_car, plan, onnx, facts, model)


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256.

    Raises:
        ModelConfigError: the file cannot be read.
    """
    with reading(path):
        return file_sha256(path)


def _shortest(one: str, other: str) -> tuple[str, str]:
    """Return both versions in the shortest form in which they differ: 10.3 and 10.16, but
    10.3.0.26 and 10.3.0.30."""
    if one.split(".")[:2] == other.split(".")[:2] and one != other:
        return one, other
    return ".".join(one.split(".")[:2]), ".".join(other.split(".")[:2])
