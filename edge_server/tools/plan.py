"""Builds, inspects and verifies TensorRT plans for people."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
from google.protobuf import text_format
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.tensorrt.plan_cache import PLAN_NAME, PlanCache, build_lock, make_plan
from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    DeviceFacts,
    build_options_of,
    cautions,
    encode,
    given_profiles,
    io_names,
    layer_table,
    network_of,
    plan_faults,
    precision_file,
    read_side_car,
    sha256_of,
    side_car_path,
)
from edge_server.backends.tensorrt.plan_process import (
    Progressed,
    Step,
    TrtMessage,
    build,
    probe_device,
    read_layers,
)
from edge_server.board.installation import remedy
from edge_server.daemon.parts import models_aside
from edge_server.errors import EdgeServerError, InvalidRequest, ModelConfigError, Unavailable
from edge_server.lifecycle.model_validation import golden_pairs, not_finite
from edge_server.model_config.completion import complete, configurations
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import reading, require_path
from edge_server.process.disk import state_directory
from edge_server.repository.scan import Repositories, files_in
from edge_server.requests import InferRequest
from edge_server.settings import Repository, read_settings
from edge_server.tensors import Tensor, as_floats, shape_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from edge_server.backends.tensorrt.plan_options import PlanTensor, SideCar
    from edge_server.backends.tensorrt.plan_process import (
        BuildEvent,
        BuildJob,
        OnEvent,
        PlanBuilt,
    )
    from edge_server.inference.data_plane import DataPlane
    from edge_server.model_config.files import ModelFiles

_ONNX_NAME = "model.onnx"


@dataclass(frozen=True)
class Target:
    """One model version's plan.

    Attributes:
        name: the name in texts, and the argument for further verbs.
        options: of the build, from its configuration.
        files: None for a single ONNX file.
        config: as written, not completed from the model's file; None for a single ONNX file.
    """

    name: str
    onnx: Path
    plan: Path
    options: BuildOptions
    files: ModelFiles | None = None
    config: ModelConfig | None = None
    version: int = 1


def find_target(
    model: str, repositories: Sequence[Path], version: int | None = None, config_name: str = ""
) -> Target:
    """Return the paths of `model`'s files, whether or not the files exist.

    Args: config_name: the setting; of the configurations that the model prefers, the first that
        runs a plan counts.

    Raises:
        ModelConfigError: the model or version does not exist, or its configuration is wrong.
    """
    path = Path(model)
    if path.suffix == ".onnx":
        return Target(model, path, path.with_suffix(".plan"), BuildOptions())
    # A name of the repository wins over a directory of that name in the current one.
    files = Repositories(repositories).find(model) or (files_in(path) if path.is_dir() else None)
    if files is None:
        raise ModelConfigError(
            f"no model '{model}' in {', '.join(map(str, repositories))}, and no directory of that "
            "name; give --model-repository DIR"
        )
    if isinstance(files, ModelConfigError):
        raise files
    if not files.versions:
        raise ModelConfigError(f"{files.directory}: no version directory, like {files.name}/1")
    chosen = version or max(files.versions)
    if chosen not in files.versions:
        has = ", ".join(map(str, files.versions))
        raise ModelConfigError(f"{files.directory}: no version {chosen}; there are: {has}")
    config = _config(files, config_name)
    directory = files.versions[chosen]
    filename = config.default_model_filename
    return Target(
        model,
        directory / (filename if filename.endswith(".onnx") else _ONNX_NAME),
        directory / (filename if filename.endswith(".plan") else PLAN_NAME),
        build_options_of(config),
        files,
        config,
        chosen,
    )


def target_of(arguments: argparse.Namespace) -> Target:
    settings = read_settings(arguments.config, {}).repository
    repositories = list(arguments.model_repository or map(Path, settings.paths))
    return find_target(arguments.model, repositories, arguments.version, settings.config_name)


def verify_plan(arguments: argparse.Namespace) -> int:
    """Print how far a plan is off; return the exit code."""
    found = verify(target_of(arguments), arguments.tolerance, arguments.samples)
    print("\n".join(found.lines))
    if found.agrees:
        return 0
    differ = f"edge-server: {arguments.model}: the plan's outputs differ from the ONNX file's"
    print(differ, file=sys.stderr)
    return 1


def require_onnx(target: Target) -> None:
    """Raises: ModelConfigError: the ONNX file is missing or unreadable."""
    with reading(target.onnx):
        if not target.onnx.exists():
            raise ModelConfigError(
                f"{target.onnx}: missing; a plan is built from an ONNX file: put it there"
            )
    require_path(target.onnx, target.name)


def _config(files: ModelFiles, config_name: str) -> ModelConfig:
    for chosen, message in configurations(files, config_name):
        complete(message, chosen)
        if message.backend == "tensorrt":
            break
    if message.platform == "ensemble":
        raise ModelConfigError(
            f"{files.config_path}: an ensemble has no plan of its own; build those of its members"
        )
    return ModelConfig.of(message)


def build_plan(arguments: argparse.Namespace) -> Iterator[str]:
    """Build a plan with the options of its configuration and `arguments`; yield what it is."""
    target = target_of(arguments)
    require_onnx(target)
    options = requested_options(target.options, arguments)
    # Which version builds matters to FP16 alone, and it takes a process to ask.
    here = probe_device() if options.precision == "fp16" else DeviceFacts()
    onnx, options = network_of(target.onnx, options, here.version)
    plan: Path = arguments.out or target.plan
    memory_limit_bytes = (arguments.memory_limit or 0) << 20
    timing_cache = None
    if not arguments.no_timing_cache:
        timing_cache = PlanCache(state_directory() / "plans").timing_cache
    bar = BuildBar(verbose=arguments.verbose)

    def run(job: BuildJob, on_event: OnEvent) -> PlanBuilt:
        return build(job, on_event, memory_limit_bytes)

    try:
        with build_lock(lambda: bar(Step("waiting for another build"))):
            side_car = make_plan(onnx, plan, options, run, bar, timing_cache=timing_cache)
    finally:
        bar.close()
    yield from _summary(target, plan, side_car, options)
    if bar.warnings and not arguments.verbose:
        yield f"TensorRT warned {bar.warnings} times; --verbose shows it"


def _built_of(target: Target, side_car: SideCar | None) -> Path:
    """Return the ONNX file of `network_of` that a plan was built of; without one, the network."""
    if side_car is None:
        return target.onnx
    files = (precision_file(target.onnx, each) for each in ("fp16", "int8"))
    there = (file for file in files if file.is_file())
    return next((f for f in there if sha256_of(f) == side_car.onnx_sha256), target.onnx)


def requested_options(configured: BuildOptions, arguments: argparse.Namespace) -> BuildOptions:
    """Return the options of the configuration, overridden by the arguments.

    Raises:
        InvalidRequest: the arguments contradict each other.
        Unavailable: the directory of samples does not exist.
    """
    if arguments.fp16 and arguments.int8:
        raise InvalidRequest("--int8 lets layers calculate in FP16 too; give one of the two")
    if arguments.gpu and arguments.dla_core is not None:
        raise InvalidRequest("--gpu and --dla-core name where to build for; give one of the two")
    samples = arguments.calibration
    if samples is not None and not samples.is_dir():
        raise Unavailable(f"--calibration {samples}: no such directory")
    given: dict[str, Any] = {
        "precision": "int8" if arguments.int8 else "fp16" if arguments.fp16 else None,
        "strongly_typed": arguments.strongly_typed or None,
        "profiles": given_profiles(arguments.min, arguments.opt, arguments.max) or None,
        "dla_core": arguments.dla_core,
        "gpu_fallback": False if arguments.no_gpu_fallback else None,
        "max_gpu_layers": arguments.max_gpu_layers,
        "workspace_mib": arguments.workspace,
        "calibration": None if samples is None else str(samples.absolute()),
    }
    options = replace(configured, dla_core=None) if arguments.gpu else configured
    return replace(options, **{name: value for name, value in given.items() if value is not None})


def _summary(target: Target, plan: Path, side_car: SideCar, options: BuildOptions) -> Iterator[str]:
    built = side_car.built_with
    size_mib = plan.stat().st_size / (1 << 20)
    yield (
        f"{target.name}: {plan}, {size_mib:.1f} MiB, {side_car.precision}, built in "
        f"{side_car.build_s:.1f} s with TensorRT {built.tensorrt} for {built.sm or 'no GPU'}"
    )
    if side_car.placed is not None:
        yield f"layers: {side_car.placed}"
    if side_car.placed is not None and options.dla_core is not None:
        yield from (f"  NVDLA  {name}" for name in side_car.placed.dla)
        yield from (f"  GPU    {name}" for name in side_car.placed.gpu)
    yield f"the same with: {side_car.trtexec}"


class BuildBar:
    """Shows build events; TensorRT's messages are counted, and shown if `verbose`.

    Attributes:
        warnings: number of TensorRT's warnings.
    """

    def __init__(self, *, verbose: bool, file: TextIO | None = None) -> None:
        self._verbose = verbose
        self._file = file or sys.stderr
        self._progress = Progress(
            *(BarColumn(24), TaskProgressColumn()),
            *(TextColumn("{task.description}", markup=False), TimeElapsedColumn()),
            console=Console(file=self._file),
            transient=True,
            disable=not self._file.isatty(),
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()
        self.warnings = 0

    def __call__(self, event: BuildEvent) -> None:
        if isinstance(event, TrtMessage):
            self.warnings += event.level == "WARNING"
            if self._verbose:
                text = f"TensorRT {event.level}: {event.text}"
                self._progress.console.out(text, highlight=False)
        elif isinstance(event, Step):
            if self._progress.disable:
                print(f"{event.what} …", file=self._file, flush=True)
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(event.what, total=None)
        elif isinstance(event, Progressed):
            self._progress.update(
                self._task, total=1.0, completed=event.fraction, description=event.phase.lower()
            )

    def close(self) -> None:
        """Clear the line."""
        self._progress.stop()


def inspect_plan(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the side-car of a plan, a line per fact.

    Raises:
        ModelConfigError: the plan or its side-car is missing.
        Unavailable: this device cannot read the layers that are asked for.
    """
    target = target_of(arguments)
    with reading(target.plan):
        if not target.plan.exists():
            raise ModelConfigError(
                f"{target.plan}: missing; run `edge-server plan build {target.name}` on the device"
            )
    require_path(target.plan, target.name)
    side_car = read_side_car(target.plan)
    if side_car is None:
        raise ModelConfigError(
            f"{side_car_path(target.plan)}: missing, so nothing is known of {target.plan.name}; "
            f"run `edge-server plan build {target.name}`"
        )
    if arguments.json:
        yield encode(side_car).decode().rstrip()
        return
    yield from _inspection_lines(side_car)
    yield from _fit(target)
    if arguments.layers:
        yield from _layers(target, side_car)


def _inspection_lines(side_car: SideCar) -> Iterator[str]:
    built = side_car.built_with
    yield f"plan       sha256 {side_car.plan_sha256}"
    yield f"ONNX       sha256 {side_car.onnx_sha256}"
    yield f"built with TensorRT {built.tensorrt} in {side_car.build_s:.1f} s"
    if built.sm:
        yield f"GPU        {built.gpu}, {built.sm}, {built.multiprocessors} multiprocessors"
    if built.l4t:
        yield f"L4T        {built.l4t}"
    core = "" if side_car.dla_core is None else f", NVDLA core {side_car.dla_core}"
    yield f"precision  {side_car.precision}{core}"
    if side_car.placed is not None:
        yield f"layers     {side_car.placed}"
    for tensor in side_car.tensors:
        yield f"{'input' if tensor.is_input else 'output':10} {_tensor(tensor)}"
    for index, profile in enumerate(side_car.profiles):
        for name, found in profile.items():
            bounds = " ".join(shape_text(s) for s in (found.min, found.opt, found.max))
            yield f"profile {index}  {name}: {bounds}"
    yield f"trtexec    {side_car.trtexec}"


def _tensor(tensor: PlanTensor) -> str:
    parts = [f"{tensor.name}: {tensor.datatype} {shape_text(tensor.shape)}"]
    parts += ["holds a shape"] if tensor.holds_shape else []
    return ", ".join([*parts, *([tensor.format] if tensor.format else [])])


def _fit(target: Target) -> Iterator[str]:
    """Yield whether the plan runs here, or why that cannot be determined."""
    try:
        facts = probe_device()
    except EdgeServerError as error:
        yield f"here       unknown: {error}"
        return
    if facts.reason:
        yield f"here       does not run: {facts.reason}"
        return
    side_car = read_side_car(target.plan)
    onnx = _built_of(target, side_car)
    reasons = plan_faults(target.plan, onnx if onnx.exists() else None, facts, target.name)
    yield from (f"here       does not run: {reason}" for reason in reasons)
    if not reasons:
        yield "here       runs"
        for caution in cautions(side_car, facts, target.name) if side_car is not None else ():
            yield f"here       caution: {caution}"


def _layers(target: Target, side_car: SideCar) -> Iterator[str]:
    facts = probe_device()
    if facts.reason:
        raise Unavailable(f"the layers are read by TensorRT, on the device: {facts.reason}")
    print("reading the engine …", file=sys.stderr)
    information = read_layers(target.plan, side_car.dla_core)
    yield f"tensors    {', '.join(io_names(information))}"
    yield from layer_table(information)


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
    onnx = _built_of(target, side_car)
    reasons = plan_faults(target.plan, onnx, facts, target.name)
    if reasons or side_car is None:
        raise ModelConfigError(f"{target.plan}: " + "\n".join(reasons))
    usual = TOLERANCES.get(side_car.precision, _TYPED_TOLERANCE)
    opt = {
        name: found.opt for found_in in side_car.profiles[:1] for name, found in found_in.items()
    }
    with tempfile.TemporaryDirectory(prefix="edge-server-") as folder:
        write_beside(Path(folder), target, REFERENCE, onnx)
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
    aside = models_aside(Repository(paths=(str(repository),)))
    control, data_plane = stack.enter_context(aside)
    if failed := control.load_first():
        raise ModelConfigError("; ".join(f"{entry.name}: {entry.reason}" for entry in failed))
    return data_plane


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
