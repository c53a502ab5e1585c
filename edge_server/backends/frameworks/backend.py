"""`pytorch`, `tensorflow`, `openvino`, `paddle`: models of these frameworks, each instance in its
own process.

A process that crashes or hangs costs the requests that it executes, as with Python models. Where a
framework's file declares its tensors, the configuration is completed from it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from edge_server.backends.contract import (
    BackendParameters,
    check_parameters,
    log_unknown_parameters,
    parameters_of,
)
from edge_server.backends.frameworks.runner import ModelFile
from edge_server.backends.python.backend import (
    PythonModel,
    check_sandbox,
    run_for_completion,
)
from edge_server.backends.python.context import ModelContext, ModelProgram, PythonParameters
from edge_server.backends.python.environments import interpreter_of
from edge_server.board.installation import FRAMEWORKS
from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete_from
from edge_server.model_config.config import Completion, ModelConfig
from edge_server.model_config.files import ModelFiles, reading, require_path
from edge_server.model_config.validation import validate
from edge_server.tensors import Signature, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.contract import LoadContext

_RUNNER = "edge_server.backends.frameworks.runner"

# Of parameters in config.pbtxt, which have Triton's names; any other one has no effect, and the log
# says so.
ThreadCount = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Switch = Literal["true", "false", "True", "False", "1", "0"]
Yes = Literal["YES", "NO", "yes", "no", "Yes", "No"]


class PyTorchParameters(BackendParameters, frozen=True):
    """`pytorch`. The first two set threads: of one operator, and of operators side by side.

    `NUM_THREADS` and `NUM_INTEROP_THREADS` are other names for them. `INFERENCE_MODE` (default
    true) runs TorchScript without what training needs.
    """

    INTRA_OP_THREAD_COUNT: ThreadCount | None = None
    INTER_OP_THREAD_COUNT: ThreadCount | None = None
    NUM_THREADS: ThreadCount | None = None
    NUM_INTEROP_THREADS: ThreadCount | None = None
    INFERENCE_MODE: Switch = "true"
    DISABLE_OPTIMIZED_EXECUTION: Switch = "false"
    DISABLE_CUDNN: Switch = "false"


class TensorFlowParameters(BackendParameters, frozen=True):
    """`tensorflow`: threads, and which graph and signature of a SavedModel are served."""

    TF_NUM_INTRA_THREADS: ThreadCount | None = None
    TF_NUM_INTER_THREADS: ThreadCount | None = None
    TF_GRAPH_TAG: str = "serve"
    TF_SIGNATURE_DEF: str = "serving_default"


class OpenVinoParameters(BackendParameters, frozen=True):
    """`openvino`. `HINT_BF16` computes in bfloat16 where the processor can; by default in float32.

    `SKIP_OV_DYNAMIC_BATCHSIZE` keeps the batch size that the file fixes.
    """

    PERFORMANCE_HINT: Literal["LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT"] = "LATENCY"
    INFERENCE_NUM_THREADS: ThreadCount | None = None
    COMPILATION_NUM_THREADS: ThreadCount | None = None
    NUM_STREAMS: str = "AUTO"
    HINT_BF16: Yes = "NO"
    SKIP_OV_DYNAMIC_BATCHSIZE: Yes = "NO"
    TARGET_DEVICE: str = "CPU"


class PaddleParameters(BackendParameters, frozen=True):
    """`paddle` has none; the execution accelerator `mkldnn` for CPUs takes `cpu_threads`."""


@dataclass(frozen=True)
class Framework:
    """A framework as the daemon knows it: `beside` are the suffixes of what a model's file is read
    with, `unsigned` those of the files that do not declare their tensors."""

    parameters: type[BackendParameters]
    beside: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()


_FRAMEWORKS = {
    "pytorch": Framework(PyTorchParameters, unsigned=(".pt", ".pth", "")),
    "tensorflow": Framework(TensorFlowParameters),
    "openvino": Framework(OpenVinoParameters),
    "paddle": Framework(PaddleParameters, beside=(".pdiparams",)),
}


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete names, types, shapes and the batch size from the model's file, see `complete_from`;
    it is read in its own process, within `initialize_timeout_s`."""
    framework = _FRAMEWORKS[config.backend]
    directory = files.versions[version]
    parameters = check_parameters(files, config, PythonParameters, others=True)
    check_parameters(files, config, framework.parameters, others=True)
    known = framework.parameters.__struct_fields__
    also = PythonParameters.__struct_fields__
    log_unknown_parameters(config, (*known, *also), ", ".join(known) or "none")
    _check_accelerators(files, config)
    path = directory / config.default_model_filename
    for needed in (path, *map(path.with_suffix, framework.beside)):
        with reading(needed):
            is_directory = needed.is_dir()
        if not is_directory:
            require_path(needed, config.name)
    program = _program(config, path)
    if path.suffix in framework.unsigned or (
        # Triton completes no configuration of PyTorch's.
        config.backend == "pytorch" and _declares_tensors(config)
    ):
        _require_tensors(files, config, path)
    elif _declares_tensors(config) and config.max_batch_size > 0 and not config.sequence_batching:
        # An import of the framework less; each instance checks the configuration when it starts.
        config = complete_from(files, config, _configured(config))
    else:
        context = ModelContext(directory, config, parameters, program=program)
        found = run_for_completion(context)
        if (signature := _decoded(found)) is None:
            _require_tensors(files, config, path)
        else:
            config = complete_from(files, config, signature)
    validate(config.message, files, frozenset({config.backend}), Completion(auto=False))
    return config


def load(context: LoadContext) -> PythonModel:
    """Return the model; no process starts before its first instance is made."""
    directory, config = context.directory, context.config
    path = directory / config.default_model_filename
    check_sandbox(path, config, warn=True)
    program = _program(config, path)
    files = ModelFiles(config.name, directory.parent, {})

    def check(found: str) -> None:
        if (signature := _decoded(found)) is not None:
            _check_agreement(files, config, signature)

    return PythonModel(
        ModelContext(
            directory,
            config,
            parameters_of(config, PythonParameters),
            context.server,
            program=replace(program, check=check),
        )
    )


def _decoded(found: str) -> Signature | None:
    return msgspec.json.decode(found, type=Signature | None)


def _declares_tensors(config: ModelConfig) -> bool:
    given, made = config.message.input, config.message.output
    return bool(given and made) and all(t.data_type and t.dims for t in (*given, *made))


def _configured(config: ModelConfig) -> Signature:
    """Return the signature of a file that agrees with a configuration, which batches."""
    inputs, outputs = (
        tuple(replace(spec, shape=(-1, *config.model_shape(spec))) for spec in specs)
        for specs in (config.inputs, config.outputs)
    )
    return Signature(inputs, outputs)


def _check_agreement(files: ModelFiles, config: ModelConfig, signature: Signature) -> None:
    completed = complete_from(files, config, signature)
    if completed.max_batch_size != config.max_batch_size:
        raise ModelConfigError(
            f"{files.config_path}: model '{config.name}' batches and the configuration's dims have "
            "no batch dimension; give max_batch_size, or the dims in full"
        )
    if missing := sorted(completed.input_names - config.input_names):
        raise ModelConfigError(
            f"{files.config_path}: model '{config.name}' has an input '{missing[0]}' that the "
            "configuration does not name; add it"
        )


def _check_accelerators(files: ModelFiles, config: ModelConfig) -> None:
    chosen = config.message.optimization.execution_accelerators
    for kind, known in (("gpu", ()), ("cpu", ("mkldnn",))):
        for each in getattr(chosen, f"{kind}_execution_accelerator"):
            if config.backend == "paddle" and each.name not in known:
                raise ModelConfigError(
                    f"{files.config_path}: model '{config.name}': {kind}_execution_accelerator "
                    f"'{each.name}' is not passed on to Paddle; remove it"
                )


def _require_tensors(files: ModelFiles, config: ModelConfig, path: Path) -> None:
    for kind in ("input", "output"):
        if not getattr(config.message, kind):
            raise ModelConfigError(
                f"{files.config_path}: model '{config.name}' has no {kind}s, and {path.name} does "
                "not declare them: name them in config.pbtxt"
            )


def _program(config: ModelConfig, path: Path) -> ModelProgram:
    python = interpreter_of(config, dict([FRAMEWORKS[config.backend]])).path
    file = msgspec.json.encode(model_file(path, config)).decode()
    return ModelProgram(python, _RUNNER, {"framework": config.backend, "file": file})


def model_file(path: Path, config: ModelConfig) -> ModelFile:
    """Return what the process learns of the model; the configuration may be incomplete."""
    batching = config.sequence_batching
    controls, states = (batching.controls, batching.states) if batching else ((), ())
    inputs, outputs = (
        (replace(spec, shape=config.model_shape(spec)) for spec in specs)
        for specs in (config.inputs, config.outputs)
    )
    instances = sum(len(group.placements) for group in config.instance_groups)
    optimization = config.message.optimization
    accelerators = optimization.execution_accelerators.cpu_execution_accelerator
    return ModelFile(
        str(path),
        config.platform,
        (
            *inputs,
            *(TensorSpec(each.input_name, each.datatype, (1,)) for each in controls),
            *(TensorSpec(each.input_name, each.datatype, each.shape) for each in states),
        ),
        (*outputs, *(TensorSpec(each.output_name, each.datatype, each.shape) for each in states)),
        config.max_batch_size,
        config.parameters,
        {each.name: dict(each.parameters) for each in accelerators},
        # More threads than processors make every inference slower.
        max(1, len(os.sched_getaffinity(0)) // max(1, instances)),
    )
