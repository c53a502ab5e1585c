"""`edge-server plan verify`: compares the outputs of a plan and its ONNX file for equal inputs."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.tensorrt.plan_options import plan_faults, read_side_car
from edge_server.backends.tensorrt.plan_process import probe_device
from edge_server.board.installation import remedy
from edge_server.cli.plan.target import require_onnx
from edge_server.errors import ModelConfigError, Unavailable
from edge_server.gpu.device import Devices
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.model_validation import golden_pairs, not_finite
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor, as_floats, shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.cli.plan.target import Target
    from edge_server.model_config.config import ModelConfig

# Tolerance of an element, relative to the largest of its output. FP32 on a GPU is TF32 where that
# is faster; INT8 has 8 bits where FP32 has 24.
TOLERANCES = {"fp32": 2e-3, "fp16": 2e-2, "int8": 1e-1}
_TYPED_TOLERANCE = 2e-2
# Fields that change how a model is served, not its outputs; the file is given by name.
_NOT_COMPARED = (
    *("response_cache", "model_warmup", "version_policy", "dynamic_batching"),
    "cc_model_filenames",
)
REFERENCE = "reference"
PLAN = "plan"
_HALF = 0.5


class Sample(NamedTuple):
    """Inputs with a name for the report, and the recording's own tolerances of their outputs."""

    name: str
    inputs: Mapping[str, Tensor]
    tolerances: Mapping[str, float]


@dataclass
class Verified:
    """The result of a comparison, a line for each sample and output."""

    agrees: bool = True
    lines: list[str] = field(default_factory=list)


def verify(target: Target, tolerance: float | None, samples: int) -> Verified:
    """Run the plan of `target` as it would serve, and its ONNX file with ONNX Runtime.

    The inputs are those of the model's golden pairs, if it has some, else random.

    Raises:
        Unavailable: this is not the plan's device, or ONNX Runtime is not installed.
        ModelConfigError: plan, side-car and ONNX file do not belong together.
    """
    require_onnx(target)
    side_car = read_side_car(target.plan)
    facts = probe_device()
    if facts.reason:
        raise Unavailable(f"verify runs the plan, which takes its device: {facts.reason}")
    if importlib.util.find_spec("onnxruntime") is None:
        raise Unavailable(f"verify compares with ONNX Runtime: {remedy('onnxruntime')}")
    reasons = plan_faults(target.plan, target.onnx, facts, target.name)
    if reasons or side_car is None:
        raise ModelConfigError(f"{target.plan}: " + "\n".join(reasons))
    usual = TOLERANCES.get(side_car.precision, _TYPED_TOLERANCE)
    opt = {
        name: found.opt for found_in in side_car.profiles[:1] for name, found in found_in.items()
    }
    with tempfile.TemporaryDirectory(prefix="edge-server-") as folder:
        write_beside(Path(folder), target, REFERENCE, target.onnx)
        write_beside(Path(folder), target, PLAN, target.plan)
        with ExitStack() as stack:
            data_plane = load_models(Path(folder), stack)
            config = data_plane.find(REFERENCE, "").config
            inputs = samples_for(config, target, opt, samples)
            return compare_models(data_plane, inputs, usual, tolerance)


def samples_for(
    config: ModelConfig, target: Target, shapes: Mapping[str, tuple[int, ...]], count: int
) -> list[Sample]:
    """Return the golden pairs of the model, else `count` random samples of `shapes`."""
    return _golden(config, target) or _random(config, shapes, count)


def write_beside(
    repository: Path, target: Target, name: str, file: Path, *, platform: str = ""
) -> None:
    """Write a model `name` into `repository` that is `target`, but served from `file` alone.

    Args:
        platform: the platform that loads it; by default that of a plan, or of an ONNX file.
    """
    message = pb.ModelConfig()
    if target.config is not None:
        message.CopyFrom(target.config.message)
    message.name = name
    message.backend = ""
    usual = "tensorrt_plan" if name == PLAN else "onnxruntime_onnx"
    message.platform = platform or usual
    message.default_model_filename = file.name
    for field_name in _NOT_COMPARED:
        message.ClearField(field_name)
    if any(group.kind == pb.ModelInstanceGroup.KIND_CPU for group in message.instance_group):
        # The groups are the ONNX file's; plans run on GPUs only.
        message.ClearField("instance_group")
    if name == REFERENCE:
        # The configuration's groups and parameters are the plan's.
        for field_name in ("instance_group", "parameters", "optimization"):
            message.ClearField(field_name)
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(text_format.MessageToString(message))
    for each in file.parent.iterdir() if name == PLAN else [file]:
        # Copies the side-car with its plan, and the ONNX file that it refers to.
        if each.is_file() and not each.name.startswith("."):
            shutil.copyfile(each, directory / "1" / each.name)


def load_models(repository: Path, stack: ExitStack) -> DataPlane:
    """Return a data plane with `repository`'s models, on this device's GPUs; `stack` closes it.

    Raises:
        ModelConfigError: a model cannot be loaded.
    """
    devices = Devices()
    stack.callback(devices.close)
    registry = ModelRegistry()
    stack.callback(registry.wait_closed, 10.0)
    stack.callback(registry.clear)
    completion = Completion(gpus=devices.count, no_gpu=devices.reason)
    loader = RepositoryLoader(
        ModelTable(registry), Repositories([repository]), completion=completion, devices=devices
    )
    if failed := loader.load_all():
        raise ModelConfigError("; ".join(f"{entry.name}: {entry.reason}" for entry in failed))
    return DataPlane(registry)


def compare_models(
    data_plane: DataPlane, samples: list[Sample], usual: float, tolerance: float | None
) -> Verified:
    """Send the same requests to the models REFERENCE and PLAN, and compare the responses.

    Args:
        usual: tolerance of an element, relative to the largest of its output.
        tolerance: tolerance of every element instead; None is the recorded one, or `usual`.
    """
    found = Verified()
    for sample in samples:
        want, made = (
            data_plane.infer(InferRequest(model, sample.inputs)).outputs
            for model in (REFERENCE, PLAN)
        )
        for name in sorted(want):
            stated = sample.tolerances.get(name) if tolerance is None else tolerance
            fault, text = compare_tensors(want[name], made[name], usual, stated)
            found.agrees = found.agrees and not fault
            found.lines.append(f"{sample.name}: {name} {text}")
    return found


def compare_tensors(
    want: Tensor, made: Tensor, usual: float, stated: float | None
) -> tuple[bool, str]:
    """Return whether the tensors differ by more than the tolerance, and the difference as text."""
    if made.shape != want.shape:
        return True, f"has shape {shape_text(made.shape)}, not {shape_text(want.shape)}"
    if fault := not_finite(made):
        return True, fault
    got, wanted = as_floats(made), as_floats(want)
    off = np.abs(got - wanted)
    largest = float(np.abs(wanted).max(initial=0.0))
    allowed = usual * largest if stated is None else stated
    worst, mean = float(off.max(initial=0.0)), float(off.mean()) if off.size else 0.0
    agrees = worst <= allowed
    verdict = "agrees" if agrees else "differs"
    return not agrees, (
        f"{verdict}: off by up to {worst:.3g}, {mean:.3g} on average, of at most {largest:.3g}; "
        f"may by {allowed:.3g}"
    )


def _golden(config: ModelConfig, target: Target) -> list[Sample]:
    if target.files is None:
        return []
    pairs = golden_pairs(config, target.version, target.files.directory)
    return [Sample(pair.path.name, pair.inputs, pair.tolerances) for pair in pairs]


def _random(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], count: int) -> list[Sample]:
    """Return repeatable samples: floats in [0, 1), integers 0, 1; free dimensions by `shapes`."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(count):
        inputs = {}
        for spec in config.inputs:
            free = shapes.get(spec.name, config.full_shape(spec))
            shape = tuple(1 if size == -1 else size for size in free)
            high = generator.random(shape)
            values = high if spec.datatype.numpy.kind == "f" else (high < _HALF)
            inputs[spec.name] = Tensor(values.astype(spec.datatype.numpy))
        samples.append(Sample(f"random {number + 1}", inputs, {}))
    return samples
