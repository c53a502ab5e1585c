"""`tensorrt`: plans of TensorRT 8.6 to 11, on the GPU or on an NVDLA core beside it.

A plan runs only on the TensorRT version and the GPU that it was built for. The backend compares the
plan's side-car (`model.plan.json`) with this device before TensorRT reads the plan.

In the configuration, `instance_group` sets the placement: `gpus`, `profile`, and in
`secondary_devices` one NVDLA core (`kind: KIND_NVDLA device_id: 0`). `optimization.cuda` sets the
execution: `graphs`, `graph_spec`, `busy_wait_events`, `output_copy_stream`.

Parameters in config.pbtxt: `dla_fallback` (`gpu`: on a device without that NVDLA core the model
runs on the GPU alone; without the parameter, the load fails), `mapped_memory` (default true: on a
GPU that shares the host's memory, inputs and outputs are not copied), `auto_build` (default false:
a plan that does not fit this device is rebuilt from the ONNX file beside it) and `cuda_graphs`
(default true: a plan of fixed shapes runs as a CUDA graph; false: no plan does). Any other
parameter has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from edge_server.backends.contract import check_parameters, ours, parameters_of
from edge_server.backends.tensorrt.plan_config import (
    NOT_ON_A_GPU,
    Options,
    PlanIO,
    TensorRtParameters,
    agreed,
    on_gpu_alone,
    plan_name,
)
from edge_server.backends.tensorrt.plan_options import read_side_car
from edge_server.errors import EdgeServerError, ModelConfigError, ModelLoadError
from edge_server.gpu.device import BareGpu
from edge_server.model_config.files import require_path
from edge_server.process.child import ChildFailed, run_in_child

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.contract import LoadContext
    from edge_server.backends.tensorrt.model import PlanModel
    from edge_server.backends.tensorrt.source import PlanSource
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.files import ModelFiles

READ_TIMEOUT_S = 300.0


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete the configuration from the plan: by its side-car, or else in a separate process,
    as reading a plan without a side-car may crash the process."""
    check_parameters(files, ours(config, TensorRtParameters), TensorRtParameters)
    _check_kind(files, config)
    directory = files.versions[version]
    capability = BareGpu().compute_capability if config.message.cc_model_filenames else ""
    plan = directory / plan_name(config, capability)
    side_car = read_side_car(plan)
    if side_car is not None:
        return agreed(files, config, PlanIO(side_car.tensors, side_car.profiles))
    parameters = parameters_of(config, TensorRtParameters)
    if parameters.auto_build:
        _require_everything(files, config)
        return config
    require_path(plan, config.name)
    group = config.instance_groups[0]
    try:
        io = _read_plan(plan, group.gpus[0], group.dla_core)
    except ModelConfigError:
        if group.dla_core is None or parameters.dla_fallback != "gpu":
            raise
        io = _read_plan(on_gpu_alone(plan), group.gpus[0], None)
    return agreed(files, config, io)


def load(context: LoadContext) -> PlanModel:
    # Imported late, as a machine without a GPU may lack TensorRT.
    from edge_server.backends.tensorrt.model import PlanModel  # noqa: PLC0415

    config = context.config
    options = Options.of(config, parameters_of(config, TensorRtParameters))
    return PlanModel(context.directory, config, options, context.devices, _source(context))


def prepare(context: LoadContext) -> None:
    """Build the plans that `load` would build; see `contract.Prepares`."""
    from edge_server.backends.tensorrt.engine import facts_of  # noqa: PLC0415 - likewise

    source = _source(context)
    for placement in dict.fromkeys(p for g in context.config.instance_groups for p in g.placements):
        source.find(facts_of(context.devices.gpu(placement.gpu or 0)), placement)


def _source(context: LoadContext) -> PlanSource:
    from edge_server.backends.tensorrt.source import PlanSource  # noqa: PLC0415 - likewise

    parameters = parameters_of(context.config, TensorRtParameters)
    return PlanSource(
        context.directory, context.config, parameters, context.progress, builds=context.builds
    )


def _read_plan(plan: Path, gpu: int, dla_core: int | None) -> PlanIO:
    """Return the inputs and outputs of a plan that nobody vouches for: reading it may crash."""
    unreadable = f"unable to load plan file to auto complete config: {plan}:"
    try:
        io = run_in_child(
            "edge_server.backends.tensorrt.engine:read_plan_io",
            *(str(plan.absolute()), gpu, dla_core),
            timeout_s=READ_TIMEOUT_S,
        )
    except ChildFailed as error:
        raise ModelLoadError(f"{unreadable} the process that read it {error}") from None
    except EdgeServerError as error:
        raise ModelConfigError(f"{unreadable} {error}") from None
    return msgspec.convert(io, PlanIO)


def _check_kind(files: ModelFiles, config: ModelConfig) -> None:
    for group in config.instance_groups:
        if group.kind != "GPU":
            text = NOT_ON_A_GPU.format(model=config.name)
            no_gpu = config.completion.no_gpu
            why = "give KIND_GPU" if config.completion.gpus else f"there is no GPU: {no_gpu}"
            # The driver may come up later than the daemon.
            kind = ModelConfigError if config.completion.gpus else ModelLoadError
            raise kind(
                f"{files.config_path}: {text}: instance group {group.name} is KIND_{group.kind}; "
                f"{why}"
            )


def _require_everything(files: ModelFiles, config: ModelConfig) -> None:
    message = config.message
    tensors = (*message.input, *message.output)
    if not (message.input and message.output and all(t.data_type and t.dims for t in tensors)):
        raise ModelConfigError(
            f"{files.config_path}: with auto_build, and no side-car beside the plan, the "
            "configuration must give every input and output with data_type and dims, and "
            "max_batch_size: the plan is built to them"
        )
