"""`onnxruntime`: ONNX models on the CPU, and on what other execution providers it has.

Instances of KIND_GPU run on CUDA; `optimization.execution_accelerators` names other providers. As
in Triton, `gpu_execution_accelerator` takes `tensorrt` and `cuda`, for instances on a GPU, where
CUDA runs what TensorRT does not; `cpu_execution_accelerator` takes `openvino`. A provider that this
ONNX Runtime lacks is an error: nothing runs on the processor that was to run elsewhere. Operators
that a provider does not know run on the next one, the processor last.

Parameters in config.pbtxt: `intra_op_thread_count` (default 0: one per core),
`inter_op_thread_count` (default 1), `execution_mode` (default 0: operators run one after the other;
1: in parallel), `enable_mem_arena` and `enable_mem_pattern` (default true), on CUDA
`gpu_mem_limit` in bytes, `cudnn_conv_algo_search`, `arena_extend_strategy` and
`do_copy_in_default_stream` in Triton's numbers,
`memory.enable_memory_arena_shrinkage` (`cpu:0`: release arena memory after each run) and
`allow_spinning` (default false: waiting threads sleep, so that an idle daemon uses no CPU). Any
other parameter has no effect, which the log reports; clients see that parameter in the model's
configuration. `optimization.graph.level` is -1 (basic), 1 (extended) or 2 (none); without a level,
all optimizations are on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from functools import partial
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

# ONNX Runtime reads this variable at import. Without it, version 1.31 records usage telemetry in
# the user's home directory and sends the records to its vendor.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

from edge_server.backends.contract import (
    BackendParameters,
    Model,
    TensorInstance,
    Tensors,
    check_parameters,
    log_unknown_parameters,
    parameters_of,
    rows_of,
)
from edge_server.errors import InternalError, InvalidRequest, ModelConfigError, ModelLoadError
from edge_server.model_config.completion import complete_from
from edge_server.model_config.config import ON_CPU, BatchInputKind
from edge_server.model_config.files import reading, require_path
from edge_server.tensors import DataType, Signature, Tensor, TensorSpec, element_count, shape_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.contract import Instance, LoadContext, MemoryKind, Run
    from edge_server.model_config.config import BatchInput, ModelConfig, Placement, RaggedBatching
    from edge_server.model_config.files import ModelFiles

log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_PROVIDERS = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": _CUDA,
    "openvino": "OpenVINOExecutionProvider",
}
_WHEELS = {
    "tensorrt": "onnxruntime-gpu (on a Jetson NVIDIA's build for its JetPack)",
    "cuda": "onnxruntime-gpu (on a Jetson NVIDIA's build for its JetPack)",
    "openvino": "onnxruntime-openvino",
}

# Triton's parameters of TensorRT that ONNX Runtime has with `trt_` in front.
_TENSORRT = frozenset(
    {
        *("max_partition_iterations", "min_subgraph_size", "dla_enable", "dla_core"),
        *("engine_cache_enable", "engine_cache_path", "engine_cache_prefix", "dump_subgraphs"),
        *("force_sequential_engine_build", "context_memory_sharing_enable"),
        *("layer_norm_fp32_fallback", "timing_cache_enable", "timing_cache_path"),
        *("force_timing_cache", "detailed_build_log", "build_heuristics_enable"),
        *("sparsity_enable", "builder_optimization_level", "auxiliary_streams"),
        *("tactic_sources", "extra_plugin_lib_paths", "profile_min_shapes"),
        *("profile_max_shapes", "profile_opt_shapes", "cuda_graph_enable"),
        *("dump_ep_context_model", "ep_context_file_path", "ep_context_embed_mode"),
        *("int8_calibration_table_name", "int8_use_native_calibration_table"),
    }
)
# Parameters of a model for CUDA, and what Triton's numbers stand for.
_CUDA_WORDS: Mapping[str, Sequence[str]] = {
    "gpu_mem_limit": (),
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": (),
}
_PRECISIONS = {"FP32": "", "FP16": "fp16", "BF16": "bf16", "INT8": "int8"}
# Triton passes OpenVINO nothing; these are the provider's own.
_OPENVINO = frozenset({"device_type", "precision", "num_of_threads", "num_streams", "cache_dir"})


class Provider(NamedTuple):
    name: str
    options: Mapping[str, str]


def providers_of(
    config: ModelConfig, placement: Placement, available: Collection[str]
) -> list[Provider]:
    """Return the providers of an instance, the processor's last."""
    chosen = config.message.optimization.execution_accelerators
    asked = [
        *_known(chosen.gpu_execution_accelerator, ("tensorrt", "cuda")),
        *_known(chosen.cpu_execution_accelerator, ("openvino",)),
    ]
    on_gpu = placement.kind == "GPU"
    if chosen.gpu_execution_accelerator and not on_gpu:
        way_out = "give KIND_GPU, or remove the accelerator"
        if not config.completion.gpus:
            way_out = "there is no GPU here: remove the accelerator, or serve it where one is"
        raise ModelConfigError(
            f"gpu_execution_accelerator '{asked[0][0]}' is for instances on a GPU, and this one is "
            f"of KIND_{placement.kind}; {way_out}"
        )
    if on_gpu and "cuda" not in dict(asked):
        asked.append(("cuda", {}))
    own = parameters_of(config, OnnxRuntimeParameters)
    of_cuda = {
        name: words[value] if words else str(value)
        for name, words in _CUDA_WORDS.items()
        if (value := getattr(own, name)) is not None
    }
    device = {"device_id": str(placement.gpu or 0)} if on_gpu else {}
    found = []
    for name, parameters in asked:
        provider = _PROVIDERS[name]
        if provider not in available:
            raise ModelConfigError(
                f"execution accelerator '{name}': this ONNX Runtime has no {provider} (it has "
                f"{', '.join(available)}); install {_WHEELS[name]} instead, or "
                f"{'give KIND_CPU' if on_gpu else 'remove the accelerator'}"
            )
        options = dict(_options(name, parameters))
        if name == "cuda":
            options = {**of_cuda, **options}
        found.append(Provider(provider, options if name == "openvino" else {**options, **device}))
    return [*found, Provider(CPU, {})]


def _known(accelerators: Any, known: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    for each in accelerators:
        if each.name not in known:
            raise ModelConfigError(
                f"unknown Execution Accelerator '{each.name}' is requested; there it may be "
                f"{' or '.join(known)}"
            )
        yield each.name, dict(each.parameters)


def _options(name: str, parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the provider's options for Triton's parameters; those of CUDA are the same."""
    for key, value in sorted(parameters.items()):
        if name == "cuda" or (name == "openvino" and key in _OPENVINO):
            yield key, value
        elif name == "tensorrt" and key in _TENSORRT:
            yield f"trt_{key}", value
        elif name == "tensorrt" and key == "max_workspace_size_bytes":
            yield "trt_max_workspace_size", value
        elif name == "tensorrt" and key == "precision_mode":
            if value not in _PRECISIONS:
                raise ModelConfigError(
                    f"unsupported precision mode '{value}' is requested; known: "
                    f"{', '.join(_PRECISIONS)}"
                )
            if _PRECISIONS[value]:
                yield f"trt_{_PRECISIONS[value]}_enable", "1"
        else:
            shown = {"tensorrt": "TensorRT", "openvino": "OpenVINO"}[name]
            raise ModelConfigError(
                f"unknown parameter '{key}' is provided for {shown} Execution Accelerator"
            )


_ONNX_TYPES = {
    **{f"tensor({each.numpy.name})": each for each in DataType},
    "tensor(float)": DataType.FP32,
    "tensor(double)": DataType.FP64,
    "tensor(bfloat16)": DataType.BF16,
    "tensor(string)": DataType.BYTES,
}


# ONNX's number for bfloat16, a type that numpy lacks.
_ONNX_BFLOAT16 = 16
_ERROR, _FATAL = 3, 4
_GRAPH_LEVELS = {
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}

ThreadCount = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class OnnxRuntimeParameters(BackendParameters, frozen=True):
    intra_op_thread_count: ThreadCount = 0
    inter_op_thread_count: ThreadCount = 1
    execution_mode: Literal[0, 1] = 0
    enable_mem_arena: bool = True
    enable_mem_pattern: bool = True
    arena_shrinkage: Literal["", "cpu:0"] = msgspec.field(
        default="", name="memory.enable_memory_arena_shrinkage"
    )
    allow_spinning: bool = False
    gpu_mem_limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    cudnn_conv_algo_search: Literal[0, 1, 2] | None = None
    arena_extend_strategy: Literal[0, 1] | None = None
    do_copy_in_default_stream: Literal[0, 1] | None = None


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete names, types, shapes and the batch size from the ONNX file: see `complete_from`."""
    check_parameters(files, config, OnnxRuntimeParameters, others=True)
    known = OnnxRuntimeParameters.__struct_encode_fields__
    log_unknown_parameters(config, known, ", ".join(known))
    for name in sorted(_CUDA_WORDS.keys() & config.parameters.keys()):
        if all(placement.gpu is None for placement in _placements(config)):
            log.warning(
                "model %s: parameter '%s' has no effect here: no instance is on a GPU",
                config.name,
                name,
            )
    level = config.message.optimization.graph.level
    if level not in _GRAPH_LEVELS:
        raise ModelConfigError(
            f"{files.config_path}: optimization.graph.level is {level}; give -1 (basic), 1 "
            "(extended) or 2 (none), or leave it out for all"
        )
    path = _model_path(files.versions[version], config)
    require_path(path, config.name)
    for placement in _placements(config):
        _providers(files.config_path, config, placement)
    options = ort.SessionOptions()
    options.log_severity_level = _ERROR
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = _open_session(path, options)
    signature = Signature(
        tuple(_spec(path, node) for node in session.get_inputs()),
        tuple(_spec(path, node) for node in session.get_outputs()),
        tuple(_spec(path, node, default=True) for node in session.get_overridable_initializers()),
    )
    types = {spec.datatype for spec in (*signature.inputs, *signature.outputs)}
    if types >= {DataType.BF16, DataType.BYTES}:
        raise ModelConfigError(
            f"{path}: model '{config.name}' has both string and bfloat16 tensors, which ONNX "
            "Runtime does not take from Python together; export it with float tensors instead"
        )
    return complete_from(files, config, signature)


def load(context: LoadContext) -> OnnxModel:
    config = context.config
    options = ort.SessionOptions()
    options.log_severity_level = _ERROR
    parameters = parameters_of(config, OnnxRuntimeParameters)
    options.intra_op_num_threads = parameters.intra_op_thread_count
    options.inter_op_num_threads = parameters.inter_op_thread_count
    if parameters.execution_mode:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = parameters.enable_mem_arena
    options.enable_mem_pattern = parameters.enable_mem_pattern
    options.graph_optimization_level = _GRAPH_LEVELS[config.message.optimization.graph.level]
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", str(int(parameters.allow_spinning))
    )
    path = _model_path(context.directory, config)
    sessions = {}
    for placement in _placements(config):
        providers = _providers(context.directory, config, placement)
        sessions[placement.gpu] = _open_session(path, options, providers)
    file_bytes = len(sessions) * _file_bytes(path)
    return OnnxModel(config, sessions, parameters.arena_shrinkage, file_bytes)


def _file_bytes(path: Path) -> int:
    """Return the size of a model's file and of what else is beside it, its external data, but for
    other models."""
    with reading(path):
        files = [each for each in path.parent.rglob("*") if each.is_file()]
        return sum(f.stat().st_size for f in files if f == path or f.suffix != path.suffix)


def _placements(config: ModelConfig) -> list[Placement]:
    found = {p.gpu: p for group in config.instance_groups for p in group.placements}
    return list(found.values()) or [ON_CPU]


def _providers(where: Path, config: ModelConfig, placement: Placement) -> list[Provider]:
    try:
        return providers_of(config, placement, ort.get_available_providers())
    except ModelConfigError as error:
        raise ModelConfigError(f"{where}: model '{config.name}': {error}") from error


class OnnxModel(Model):
    """One ONNX Runtime session for each device (the GPU's number, None for the CPU); several
    instances may run it at once. A tensor without dimensions has the shape [1] outside, as in
    Triton."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: dict[int | None, Any],
        arena_shrinkage: str,
        file_bytes: int,
    ) -> None:
        self._file_bytes = file_bytes
        self._config = config
        self._name = config.name
        self._sessions = sessions
        self._arena_shrinkage = arena_shrinkage
        # When each present run began, and the options that can end it.
        self._runs: dict[int, tuple[float, Any]] = {}
        self._interrupted_before = -inf
        session = next(iter(sessions.values()))
        nodes = (*session.get_inputs(), *session.get_outputs())
        self._scalars = frozenset(node.name for node in session.get_inputs() if node.shape == [])
        self._texts = frozenset(
            node.name for node in session.get_inputs() if node.type == "tensor(string)"
        )
        self._has_bf16 = any(_ONNX_TYPES.get(node.type) is DataType.BF16 for node in nodes)

    def make_instance(self, name: str, placement: Placement) -> Instance:
        del name  # all instances of a device are alike
        run = partial(self._run_session, placement.gpu)
        if self._config.ragged is None:
            return TensorInstance(run)
        return RaggedInstance(run, self._config, self._config.ragged)

    def memory_bytes(self) -> Mapping[MemoryKind, int]:
        return {"file": self._file_bytes}

    def interrupt(self, before: float) -> None:
        """See `Interruptible.interrupt`; an operator that is running ends first."""
        self._interrupted_before = max(self._interrupted_before, before)
        # A copy, because a run may end during the iteration.
        for began, options in list(self._runs.values()):
            if began < before:
                options.terminate = True

    def close(self) -> None:
        self._sessions.clear()

    def _run_session(self, gpu: int | None, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        session = self._sessions[gpu]
        names = sorted(outputs)
        if self._scalars:
            inputs = {
                name: Tensor(tensor.array.reshape(())) if name in self._scalars else tensor
                for name, tensor in inputs.items()
            }
        if self._has_bf16:
            # numpy lacks bfloat16, so the tensors travel as OrtValues instead of arrays.
            fed: dict[str, Any] = {name: _to_value(tensor.array) for name, tensor in inputs.items()}
            run, taken = session.run_with_ort_values, _from_value
        else:
            fed = {name: tensor.array for name, tensor in inputs.items()}
            for name in self._texts.intersection(fed):
                fed[name] = _as_str(name, fed[name])
            run, taken = session.run, _from_runtime
        options = ort.RunOptions()
        # The error of a run goes to its client; ONNX Runtime would print it to stderr as well.
        options.log_severity_level = _FATAL
        if self._arena_shrinkage:
            options.add_run_config_entry(
                "memory.enable_memory_arena_shrinkage", self._arena_shrinkage
            )
        began = time.monotonic()
        self._runs[id(options)] = began, options
        try:
            # `interrupt` notes its time before it looks for runs, and so misses none.
            if began < self._interrupted_before:
                options.terminate = True
            made = run(names, fed, options)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            if options.terminate:
                raise InternalError(
                    f"model '{self._name}': the run hung and was ended; send other inputs, or "
                    "correct the model"
                ) from error
            raise InternalError(f"onnxruntime: model '{self._name}' failed: {error}") from error
        finally:
            del self._runs[id(options)]
        return {name: taken(value) for name, value in zip(names, made, strict=True)}


class RaggedInstance(TensorInstance):
    """Joins ragged inputs to one list of the elements of all requests, in order, and other inputs
    along the batch dimension, also for a batch of one. Batch inputs are made from the requests'
    shapes. Of a batch output each request gets as many elements as the shape of its source input
    says, of other outputs its rows."""

    joins_one = True

    def __init__(self, run: Run, config: ModelConfig, ragged: RaggedBatching) -> None:
        super().__init__(run)
        self._batches = config.max_batch_size > 0
        self._ragged = ragged
        shapes = {spec.name: config.model_shape(spec) for spec in config.outputs}
        batch = (-1,) if self._batches else ()
        # Batch output → the shape of a request's part, and the input that its free sizes are of.
        self._scattered = {
            name: ((*batch, *shapes[name]), output.source)
            for output in ragged.batch_outputs
            for name in output.names
        }

    def join(self, inputs: Sequence[Tensors]) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for name in inputs[0]:
            arrays = [each[name].array for each in inputs]
            if name in self._ragged.inputs:
                arrays = [array.reshape(-1) for array in arrays]
            joined[name] = Tensor(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        for each in self._ragged.batch_inputs:
            shapes = [tensors[each.source].shape for tensors in inputs if each.source in tensors]
            tensor = Tensor(_batch_input(each, shapes))
            joined |= dict.fromkeys(each.names, tensor)
        return joined

    def split(self, made: Tensors, inputs: Sequence[Tensors]) -> list[dict[str, Tensor]]:
        parts: list[dict[str, Tensor]] = [{} for _ in inputs]
        counts = [next(iter(each.values())).shape[0] if each else 0 for each in inputs]
        for name, tensor in made.items():
            if name in self._scattered:
                arrays = self._scatter(name, tensor, inputs)
            elif self._batches:
                arrays = rows_of(name, tensor.array, counts)
            else:
                arrays = [tensor.array]
            for part, array in zip(parts, arrays, strict=True):
                part[name] = Tensor(array)
        return parts

    def _scatter(self, name: str, tensor: Tensor, inputs: Sequence[Tensors]) -> list[NDArray[Any]]:
        shape, source = self._scattered[name]
        flat = tensor.array.reshape(-1)
        shapes = [_sized(name, shape, each[source].shape) for each in inputs if source in each]
        ends = np.cumsum([0, *map(element_count, shapes)]).tolist()
        if len(shapes) < len(inputs) or ends[-1] != flat.size:
            raise InternalError(
                f"output '{name}' has {flat.size} elements; the shapes of '{source}' ask for "
                f"{ends[-1]}"
            )
        return [
            flat[begin:end].reshape(each)
            for each, (begin, end) in zip(shapes, pairwise(ends), strict=True)
        ]


def _sized(name: str, shape: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...]:
    if any(size == -1 for size in shape[len(source) :]):
        raise InternalError(
            f"output '{name}' has more dimensions than its source input has: {shape_text(source)}"
        )
    return tuple(source[place] if size == -1 else size for place, size in enumerate(shape))


def _batch_input(made: BatchInput, shapes: Sequence[tuple[int, ...]]) -> NDArray[Any]:
    counts = [element_count(shape) for shape in shapes]
    kind, dtype = made.kind, made.datatype.numpy
    if kind is BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
        # The shape is the message; Triton leaves the elements as they are.
        return np.zeros(max(counts, default=0), dtype)
    values: Mapping[BatchInputKind, Any] = {
        BatchInputKind.ELEMENT_COUNT: counts,
        BatchInputKind.ACCUMULATED_ELEMENT_COUNT: np.cumsum(counts),
        BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: np.cumsum([0, *counts]),
    }
    if kind in values:
        return np.array(values[kind], dtype)
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])], dtype)
    return items.reshape(-1) if kind is BatchInputKind.ITEM_SHAPE_FLATTEN else items


def _as_str(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Convert `bytes` to the `str` that ONNX Runtime expects; it would take the repr of `bytes`."""
    try:
        texts = [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"input '{name}': an ONNX string is UTF-8 text, which {error.object[:32]!r} is not"
        ) from error
    return np.array(texts, np.object_).reshape(array.shape)


def _from_runtime(value: Any) -> Tensor:
    value = np.ascontiguousarray(value)
    if value.dtype != np.object_:
        return Tensor(value)
    return Tensor(np.array([text.encode() for text in value.flat], np.object_).reshape(value.shape))


def _to_value(array: NDArray[Any]) -> Any:
    if DataType.from_numpy(array.dtype) is not DataType.BF16:
        return ort.OrtValue.ortvalue_from_numpy(array)
    bits = np.require(array.view("<u2"), requirements=["C", "A"])
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)


def _from_value(value: Any) -> Tensor:
    if value.data_type() != "tensor(bfloat16)":
        return Tensor.of(np.atleast_1d(value.numpy()))
    shape = value.shape() or [1]
    n_bytes = element_count(shape) * DataType.BF16.numpy.itemsize
    # A copy: the memory belongs to `value`. An empty tensor may have no memory.
    raw = ctypes.string_at(value.data_ptr(), n_bytes) if n_bytes else b""
    return Tensor(np.frombuffer(raw, DataType.BF16.numpy).reshape(shape))


def _model_path(directory: Path, config: ModelConfig) -> Path:
    """Return the model's file; a directory of that name holds the file beside its external data."""
    path = directory / config.default_model_filename
    with reading(path):
        return path / "model.onnx" if path.is_dir() else path


def _open_session(
    path: Path, options: Any, providers: Sequence[Provider] = (Provider(CPU, {}),)
) -> Any:
    try:
        session = ort.InferenceSession(str(path), options, providers=[tuple(p) for p in providers])
    except MemoryError as error:
        raise ModelLoadError(f"{path}: ONNX Runtime has no memory to load it") from error
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        # Where a path leads that leaves the model's directory is not for those who read the text.
        first_line = str(error).strip().splitlines()[0].partition(" resolved path:")[0]
        raise ModelConfigError(
            f"{path}: ONNX Runtime cannot load it: {first_line}; export it again, or copy it "
            f"again if the file is cut short ({path.stat().st_size} bytes)"
        ) from error
    # A provider whose libraries are missing is left out with a line in the log, and one that fails
    # later is replaced by the CPU's.
    session.disable_fallback()
    if absent := [p.name for p in providers if p.name not in session.get_providers()]:
        raise ModelLoadError(
            f"{path}: ONNX Runtime cannot use its {absent[0]}: a library that it needs is missing, "
            "or does not fit; the log has its reason. Without execution accelerators and with "
            "KIND_CPU the model runs on the CPU"
        )
    return session


def _spec(path: Path, node: Any, *, default: bool = False) -> TensorSpec:
    optional = node.type.startswith("optional(")
    datatype = _ONNX_TYPES.get(node.type[len("optional(") : -1] if optional else node.type)
    if datatype is None:
        raise ModelConfigError(
            f"{path}: tensor '{node.name}' has type {node.type}, which no protocol type carries"
        )
    # The protocol has no tensors without dimensions, see `OnnxModel`.
    shape = tuple(d if isinstance(d, int) and d > 0 else -1 for d in node.shape) or (1,)
    return TensorSpec(node.name, datatype, shape, optional or default)
