"""Chooses which configuration of a model is to serve, and completes it from the model directory and
the defaults.

A model may have further configurations, `configs/NAME.pbtxt`. As in Triton, one takes the place of
config.pbtxt where the setting `config_name` names it. The parameter `preferred_configs` in
config.pbtxt, which Triton ignores, asks for more: of the configurations that it lists, and before
them the one that the setting names, the first serves that has its devices here and can be loaded.
Until then, and where there is none, config.pbtxt serves."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.config import USUAL_COMPLETION, ModelConfig
from edge_server.model_config.files import CONFIGS_DIRECTORY, outside, reading
from edge_server.model_config.parse import datatype_of, read_model_config, unified
from edge_server.tensors import TensorSpec, shape_text

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles
    from edge_server.model_config.scheduling import SequenceState
    from edge_server.tensors import DataType, Signature


# Backend, its platform, and its file in a version directory: the first that exists wins, and is the
# default where none does. Triton does not find Paddle's models by their files.
_BACKENDS = (
    ("tensorrt", "tensorrt_plan", "model.plan"),
    ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    ("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    ("pytorch", "pytorch_libtorch", "model.pt"),
    ("pytorch", "torch_aoti", "model.pt2"),
    ("openvino", "", "model.xml"),
    ("python", "", "model.py"),
    ("paddle", "", "model.pdmodel"),
    ("paddle", "", "inference.json"),
    ("paddle", "", "inference.pdmodel"),
)
BACKEND_BY_PLATFORM = {platform: backend for backend, platform, _ in _BACKENDS if platform} | {
    "libtorch": "pytorch"
}
# Backends that can use a GPU; the others always run on the CPU.
GPU_BACKENDS = frozenset(
    {"tensorrt", "image_preprocess", "onnxruntime", "pytorch", "tensorflow", "paddle", "python"}
)
# Of these, those that use it without being asked: of the others, what pip installs has no GPU on a
# Jetson.
_GPU_BY_DEFAULT = frozenset({"tensorrt", "image_preprocess", "pytorch"})
_DEFAULT_SEQUENCE_IDLE_US = 1_000_000


def complete(message: Any, files: ModelFiles, completion: Completion = USUAL_COMPLETION) -> None:
    """Fill in name, backend, platform, file name and every default, in place; the backend completes
    inputs, outputs and `max_batch_size`.

    Raises: ModelConfigError: configuration, files and name determine no backend, the files cannot
        be read, or there is no configuration and completion is off."""
    if not completion.auto and not message.ListFields():
        raise ModelConfigError(
            f"{files.config_path}: missing or empty; write it, or let the server complete "
            "configurations from the models' files"
        )
    if not message.name:
        message.name = files.name
    if message.platform != "ensemble":
        _complete_backend(message, files)
        _complete_instance_groups(message, completion)
        for memory in ("input_pinned_memory", "output_pinned_memory"):
            if not message.optimization.HasField(memory):
                getattr(message.optimization, memory).enable = True
    policy = message.version_policy
    if not policy.WhichOneof("policy_choice"):
        policy.latest.SetInParent()
    if policy.HasField("latest") and not policy.latest.num_versions:
        policy.latest.num_versions = 1
    complete_scheduling(message)


def complete_scheduling(message: Any) -> None:
    """Fill in the scheduler's defaults, in place; some of them are `max_batch_size`."""
    choice = message.WhichOneof("scheduling_choice")
    if choice == "dynamic_batching":
        _complete_preferred(message.dynamic_batching, message.max_batch_size)
    elif choice == "sequence_batching":
        batching = message.sequence_batching
        if not batching.max_sequence_idle_microseconds:
            batching.max_sequence_idle_microseconds = _DEFAULT_SEQUENCE_IDLE_US
        if not batching.WhichOneof("strategy_choice"):
            batching.direct.SetInParent()
        if batching.HasField("oldest"):
            _complete_preferred(batching.oldest, message.max_batch_size)


def _complete_preferred(batching: Any, max_batch_size: int) -> None:
    if not batching.preferred_batch_size and max_batch_size > 0:
        batching.preferred_batch_size.append(max_batch_size)


def _complete_backend(message: Any, files: ModelFiles) -> None:
    if not message.backend and message.platform:
        message.backend = BACKEND_BY_PLATFORM.get(message.platform, "")
    if not message.backend and not message.platform:
        message.backend, message.platform = _backend_of(message.default_model_filename, files)
    if message.platform == "libtorch":
        message.platform = "pytorch_libtorch"
    if not (message.platform and message.default_model_filename):
        _complete_format(message, files)


def _complete_format(message: Any, files: ModelFiles) -> None:
    """Fill in the platform and the file, which determine each other where a backend reads several
    formats, and which the files determine where neither is given."""
    own = [(p, f) for backend, p, f in _BACKENDS if backend == message.backend]
    own = [each for each in own if message.platform in ("", each[0])]
    by_name = [
        (p, f)
        for p, f in own
        if message.default_model_filename
        and PurePath(f).suffix == PurePath(message.default_model_filename).suffix
    ]
    on_disk = (
        each
        for directory in files.versions.values()
        for each in own
        if len(own) > 1 and _exists(directory / each[1])
    )
    platform, file = next(iter(by_name), None) or next(on_disk, None) or next(iter(own), ("", ""))
    message.platform = message.platform or platform
    message.default_model_filename = message.default_model_filename or file


def _backend_of(filename: str, files: ModelFiles) -> tuple[str, str]:
    by_file = {f: (backend, platform) for backend, platform, f in _BACKENDS if backend != "paddle"}
    if filename in by_file:
        return by_file[filename]
    for directory in () if filename else files.versions.values():
        for file, found in by_file.items():
            if _exists(directory / file):
                return found
    stem, dot, suffix = files.name.rpartition(".")
    if dot and stem and suffix:
        return suffix, ""
    raise ModelConfigError(
        f"{files.config_path}: Invalid model name: Could not determine backend for model "
        f"'{files.name}' with no backend in model configuration. Expected model name of the form "
        f"'model.<backend_name>'. Name a 'backend' in config.pbtxt, or put one of "
        f"{', '.join(by_file)} into a version directory."
    )


def _exists(path: Path) -> bool:
    with reading(path):
        return path.exists()


def _complete_instance_groups(message: Any, completion: Completion) -> None:
    # A Jetson whose driver does not work yet has one all the same, which validation reports.
    expected = completion.gpus or int(completion.jetson)
    kind = pb.ModelInstanceGroup
    accelerators = message.optimization.execution_accelerators
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        if not group.name:
            group.name = f"{message.name}_{index}"
        if group.kind == kind.KIND_AUTO:
            is_asked = group.gpus or accelerators.gpu_execution_accelerator
            may = GPU_BACKENDS if is_asked else _GPU_BY_DEFAULT
            is_there = expected and all(gpu < expected for gpu in group.gpus)
            on_gpu = message.backend in may and is_there
            group.kind = kind.KIND_GPU if on_gpu else kind.KIND_CPU
        if group.kind == kind.KIND_GPU and not group.gpus:
            group.gpus.extend(range(completion.gpus))
        if group.count == 0:
            cpu = group.kind == kind.KIND_CPU
            group.count = 2 if cpu and message.backend == "onnxruntime" else 1


log = logging.getLogger(__name__)


def complete_from(files: ModelFiles, config: ModelConfig, signature: Signature) -> ModelConfig:
    """Return `config` completed from `signature`; what `config` does give must agree with it.

    A model batches where every tensor's first dimension is free. If the configuration then has no
    `max_batch_size` it gets the default one, with dynamic batching; but a configuration that gives
    any tensor's dims with the batch dimension, or an optional input, describes a model that does
    not batch. (0 and "not given" are the same in the protocol.) A model that was exported for a
    batch of exactly 1 agrees with `max_batch_size: 1`.

    Controls and states of the sequence batcher are among the model's tensors but not among the
    configuration's inputs and outputs.
    """
    check = _SignatureCheck(files, config, signature)
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    message.max_batch_size = check.max_batch_size()
    if (
        config.completion.auto
        and message.max_batch_size > 1
        and not message.WhichOneof("scheduling_choice")
    ):
        message.dynamic_batching.SetInParent()
    complete_scheduling(message)
    check.batched = message.max_batch_size > 0
    completed = ModelConfig.of(message, config.completion)
    return completed.with_io(check.agreed("input"), check.agreed("output"))


class _SignatureCheck:
    """Compares one configuration with one signature, whose shapes are `batched` or not."""

    def __init__(self, files: ModelFiles, config: ModelConfig, signature: Signature) -> None:
        self._path = files.config_path
        self._config = config
        self._signature = signature
        self.batched = False

    def max_batch_size(self) -> int:
        config, real = self._config, (*self._signature.inputs, *self._signature.outputs)
        size = config.max_batch_size
        fixed = [spec for spec in real if spec.shape[:1] != (-1,)]
        if size == 1:
            fixed = [spec for spec in fixed if spec.shape[:1] != (1,)]
        if size > 0 and fixed:
            raise self._no_batching(fixed[0])
        if size > 0 or fixed or not config.completion.auto or self._means_no_batching():
            return size
        size = max(0, config.completion.default_max_batch_size)
        log.warning(
            "model %s: max_batch_size set to %d, since the model batches and the configuration "
            "does not give it; set it to batch more, or the tensors' dims in full to batch nothing",
            config.name,
            size,
        )
        return size

    def _no_batching(self, spec: TensorSpec) -> ModelConfigError:
        name, shape = self._config.name, shape_text(spec.shape)
        if self._config.completion.auto:
            return ModelConfigError(
                f"{self._path}: autofill failed for model '{name}': model does not support "
                f"batching while non-zero max_batch_size is specified; tensor '{spec.name}' has "
                f"shape {shape}: set max_batch_size to 0, or export with a free first dimension"
            )
        return ModelConfigError(
            f"{self._path}: model '{name}', tensor '{spec.name}': for the model to support "
            "batching the shape should have at least 1 dimension and the first dimension must be "
            f"-1; but shape expected by the model is {shape}"
        )

    def _means_no_batching(self) -> bool:
        message, signature = self._config.message, self._signature
        if any(tensor.optional for tensor in (*message.input, *signature.inputs)):
            return True
        for configured, real in (
            (message.input, signature.inputs),
            (message.output, signature.outputs),
        ):
            ranks = {spec.name: len(spec.shape) for spec in real}
            for tensor in configured:
                dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
                if tensor.dims and ranks.get(tensor.name) == len(dims):
                    return True
        return False

    def agreed(self, kind: str) -> list[TensorSpec]:
        """The model's tensors in the file's order; a free size on one side is fixed by the other.
        Tensors of the sequence batcher are hidden, except a state among the configuration's
        outputs."""
        config = self._config
        configured = {tensor.name: tensor for tensor in getattr(config.message, kind)}
        found = {spec.name: spec for spec in getattr(self._signature, f"{kind}s")}
        if kind == "input":
            defaults = self._signature.with_defaults
            found |= {spec.name: spec for spec in defaults if spec.name in configured}
        hidden = self._check_hidden(kind, found)
        shown = {n: spec for n, spec in found.items() if n in configured or n not in hidden}
        count = len(configured)
        if count > len(shown) or (count < len(shown) and not config.completion.auto):
            raise self._error(
                f"unable to load model '{config.name}', configuration expects {count} {kind}s, "
                f"model provides {len(shown)}"
            )
        for name in configured:
            self._check_name(kind, name, shown)
        return [
            self._agreed_tensor(kind, configured[name], spec)
            if name in configured
            else replace(spec, shape=self._unbatched(spec))
            for name, spec in shown.items()
        ]

    def _check_hidden(self, kind: str, found: dict[str, TensorSpec]) -> set[str]:
        """Return the names of the tensors that schedulers make, which requests do not carry."""
        batching, ragged = self._config.sequence_batching, self._config.ragged
        datatypes: dict[str, DataType] = {}
        states: dict[str, SequenceState] = {}
        if batching is not None:
            controls = batching.controls if kind == "input" else ()
            datatypes |= {control.input_name: control.datatype for control in controls}
            states = {
                (state.input_name if kind == "input" else state.output_name): state
                for state in batching.states
            }
            datatypes |= {name: state.datatype for name, state in states.items()}
        if ragged is not None and kind == "input":
            datatypes |= ragged.batch_input_types
        for name, datatype in datatypes.items():
            self._check_name(kind, name, found)
            self._check_type(kind, name, datatype, found[name].datatype)
        for name, state in states.items():
            if unified(state.shape, self._unbatched(found[name])) is None:
                raise self._error(
                    f"model '{self._config.name}', state '{name}': the model has shape "
                    f"{shape_text(found[name].shape)} but the configuration has dims "
                    f"{shape_text(state.shape)}"
                )
        return set(datatypes)

    def _agreed_tensor(self, kind: str, tensor: Any, real: TensorSpec) -> TensorSpec:
        if kind == "input" and tensor.optional:
            self._check_optional(tensor, real)
        if tensor.data_type != pb.TYPE_INVALID:
            self._check_type(kind, tensor.name, datatype_of(tensor.data_type), real.datatype)
        ragged = self._config.ragged
        if kind == "input" and tensor.name in self._config.ragged_inputs:
            if real.shape != (-1,):
                raise self._error(
                    f"unable to load model '{self._config.name}', configuration expects model "
                    f"provides input with shape [-1]  for ragged input '{tensor.name}', model "
                    f"provides {shape_text(real.shape)}"
                )
            return TensorSpec(tensor.name, real.datatype, tuple(tensor.dims) or (-1,))
        shape = self._unbatched(real)
        dims = tuple(tensor.dims) or shape
        if kind == "output" and ragged is not None and tensor.name in ragged.batch_output_names:
            return TensorSpec(tensor.name, real.datatype, dims)
        reshaped = tensor.HasField("reshape") and bool(tensor.dims)
        agreed = unified(tuple(tensor.reshape.shape) if reshaped else dims, shape)
        if agreed is None:
            raise self._other_dims(tensor, real)
        return TensorSpec(tensor.name, real.datatype, dims if reshaped else agreed)

    def _unbatched(self, spec: TensorSpec) -> tuple[int, ...]:
        return spec.shape[1:] if self.batched else spec.shape

    def _check_name(self, kind: str, name: str, known: dict[str, TensorSpec]) -> None:
        if name not in known:
            raise self._error(
                f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(known)}"
            )

    def _check_type(
        self, kind: str, name: str, configured: DataType | None, real: DataType
    ) -> None:
        if configured is not real:
            expected = configured.config_name if configured else "TYPE_INVALID"
            raise self._error(
                f"unable to load model '{self._config.name}', configuration expects datatype "
                f"{expected} for {kind} '{name}', model provides {real.config_name}"
            )

    def _check_optional(self, tensor: Any, real: TensorSpec) -> None:
        if self.batched:
            raise self._error(
                f"optional input '{tensor.name}' is not supported for models that support batching"
            )
        if not real.optional:
            raise self._error(
                f"input '{tensor.name}' is optional in the configuration of model "
                f"'{self._config.name}', but the model cannot do without; remove 'optional', or "
                "export the model with a default for it"
            )

    def _other_dims(self, tensor: Any, real: TensorSpec) -> ModelConfigError:
        dims = tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        shown = f"(shape {shape_text(dims)})"
        if self.batched:
            dims = (-1, *dims)
            shown = (
                "(an initial batch dimension because max_batch_size > 0 followed by the explicit "
                f"tensor shape, making complete shape {shape_text(dims)})"
            )
        return self._error(
            f"model '{self._config.name}', tensor '{tensor.name}': the model expects "
            f"{len(real.shape)} dimensions (shape {shape_text(real.shape)}) but the model "
            f"configuration specifies {len(dims)} dimensions {shown}"
        )

    def _error(self, text: str) -> ModelConfigError:
        return ModelConfigError(f"{self._path}: {text}")


PREFERRED_CONFIGS = "preferred_configs"


def configurations(files: ModelFiles, config_name: str) -> list[tuple[ModelFiles, Any]]:
    """Return the configurations of a model in the order of preference, each with its message; the
    one that needs no device comes last. Raises ModelConfigError, also where a preferred one is
    missing."""
    custom = files.with_custom_config(config_name)
    names: list[str] = []
    try:
        message = read_model_config(files.config_path)
    except ModelConfigError:
        # As in Triton, it is not read where another one takes its place.
        if custom is files:
            raise
        message = pb.ModelConfig()
    if PREFERRED_CONFIGS in message.parameters:
        listed = message.parameters[PREFERRED_CONFIGS].string_value.split(",")
        names = [name.strip() for name in listed if name.strip()]
    if not names:
        return [(custom, message if custom is files else read_model_config(custom.config_path))]
    if custom is not files:
        names = [config_name, *(name for name in names if name != config_name)]
    preferred = [_preferred(files, name) for name in names]
    return [*((each, read_model_config(each.config_path)) for each in preferred), (files, message)]


def _preferred(files: ModelFiles, name: str) -> ModelFiles:
    path = f"{CONFIGS_DIRECTORY}/{name}.pbtxt"
    if outside(files.directory, path) or not (files.directory / path).is_file():
        raise ModelConfigError(
            f"{files.config_path}: parameter {PREFERRED_CONFIGS} names '{name}', and there is no "
            f"{path} beside it; write that file, or take the name out of the parameter"
        )
    return replace(files, config_name=path)


def missing_device(message: Any, completion: Completion, library: str) -> str:
    """Return which device a completed configuration lacks on this machine, also for the `library`
    that its backend lacks here; "" if it lacks none."""
    on_gpu = any(g.kind == pb.ModelInstanceGroup.KIND_GPU for g in message.instance_group)
    if on_gpu and not completion.gpus:
        return f"there is no GPU: {completion.no_gpu}"
    return f"{library} is not installed" if library else ""


def devices_of(config: ModelConfig) -> str:
    """Return the devices of a model's instances, as `GPU 0`, `NVDLA core 1 of GPU 0` or `CPU`."""
    found: dict[str, None] = {}
    for group in config.instance_groups:
        for each in group.placements:
            place = "CPU" if each.gpu is None else f"GPU {each.gpu}"
            core = "" if each.dla_core is None else f"NVDLA core {each.dla_core} of "
            found[core + place] = None
    return ", ".join(found)
