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

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from edge_server.backends.contract import check_parameters, parameters_of
from edge_server.backends.tensorrt.plan_cache import (
    PlanCache,
    PlanOrder,
    build_lock,
    ensure_plan,
    make_plan,
)
from edge_server.backends.tensorrt.plan_config import (
    NOT_ON_A_GPU,
    Options,
    PlanIO,
    TensorRtParameters,
    agreed,
    no_such_core,
    on_gpu_alone,
    plan_name,
)
from edge_server.backends.tensorrt.plan_options import (
    build_options_of,
    cautions,
    network_of,
    read_side_car,
    side_car_faults,
)
from edge_server.backends.tensorrt.plan_process import BuildProgress, Step, build
from edge_server.errors import EdgeServerError, ModelConfigError, ModelLoadError, Unavailable
from edge_server.gpu.device import BareGpu
from edge_server.model_config.files import reading, require_path
from edge_server.process.child import ChildFailed, run_in_child
from edge_server.process.disk import state_directory

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.contract import LoadContext
    from edge_server.backends.tensorrt.model import PlanModel
    from edge_server.backends.tensorrt.plan_options import DeviceFacts
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.files import ModelFiles


log = logging.getLogger(__name__)

ONNX_NAME = "model.onnx"


class PlanSource:
    """Finds the plan of one model version, whose side-car must match this device and the placement;
    a plan without one is left to TensorRT to judge. With `auto_build`, a plan that does not fit or
    is missing is built from the ONNX file beside it, in a separate process, and cached; not for
    a load that must not take minutes. Nothing here imports TensorRT."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._config, self._model = context.config, context.config.name
        self._parameters = parameters_of(context.config, TensorRtParameters)
        self._directory = context.directory
        self._onnx = context.directory / ONNX_NAME
        self._new: set[Path] = set()

    def find(
        self, facts: DeviceFacts, placement: Placement, *, retry: bool = False
    ) -> tuple[Path, int | None]:
        """Return the plan for `placement` on the device of `facts`, and the NVDLA core to load it
        for; None is the GPU. Raises ModelConfigError where no plan fits; Unavailable where the
        NVDLA core does not exist, or a plan could not, or may not, be built now."""
        plan, core, faults = self._check(facts, placement)
        if not faults:
            self._warn(plan, facts)
            return plan, core
        if not self._parameters.auto_build:
            raise ModelConfigError("\n".join(f"{plan}: {fault}" for fault in faults))
        if not self._context.builds:
            require_path(self._onnx, self._model)
            cached = _cache().find(self._order(facts, core))
            if cached is None:
                raise Unavailable(f"plan building: {plan}: {faults[0]}")
            return cached, core
        self._log_build(faults)
        built = self._built(plan.name, facts, core, retry=retry)
        self._warn(built, facts)
        return built, core

    def refresh(self, facts: DeviceFacts, placement: Placement) -> tuple[Path, bool]:
        """Return a plan that fits `placement`, and whether it was built now: with `auto_build` the
        one that `find` will return, from the cache; else in the version directory."""
        if self._parameters.auto_build:
            plan, _ = self.find(facts, placement, retry=True)
            return plan, plan in self._new
        plan, core, faults = self._check(facts, placement)
        if not faults:
            return plan, False
        self._log_build(faults)
        onnx, options, *_ = self._order(facts, core)
        with (
            self._progress(plan.name, facts) as progress,
            build_lock(lambda: progress(Step("waiting for another build"))),
        ):
            timings = _cache().timing_cache
            make_plan(onnx, plan, options, build, progress, timing_cache=timings)
        return plan, True

    def instead(
        self, refused: Path, facts: DeviceFacts, core: int | None, why: ModelConfigError
    ) -> Path:
        """Return a replacement where TensorRT refused the plan `refused`, though its side-car
        matches. Raises ModelConfigError without an ONNX file, or for a plan that was built just
        now."""
        if not self._parameters.auto_build or refused in self._new:
            raise why
        require_path(self._onnx, self._model)
        _cache().forget(refused)
        if not self._context.builds:
            raise why
        log.warning("model %s: a plan is built: %s", self._model, why)
        return self._built(refused.name, facts, core)

    def _check(
        self, facts: DeviceFacts, placement: Placement
    ) -> tuple[Path, int | None, list[str]]:
        core = self._dla_core(facts, placement)
        plan = self._directory / plan_name(self._config, facts.compute_capability)
        if core != placement.dla_core:
            plan = on_gpu_alone(plan)
        return plan, core, self._faults(plan, facts, core)

    def _dla_core(self, facts: DeviceFacts, placement: Placement) -> int | None:
        core = placement.dla_core
        if core is None or core < facts.dla_cores:
            return core
        missing = no_such_core(core, facts.dla_cores, facts.tensorrt)
        if self._parameters.dla_fallback != "gpu":
            raise Unavailable(f"model '{self._model}': {missing}")
        log.warning("model %s: runs on the GPU alone: %s", self._model, missing)
        return None

    def _faults(self, plan: Path, facts: DeviceFacts, core: int | None) -> list[str]:
        with reading(plan):
            if not plan.exists():
                return ["missing"]
        require_path(plan, self._model)
        side_car = read_side_car(plan)
        if side_car is None:
            log.info("model %s: %s has no side-car: TensorRT reads what it is", self._model, plan)
            return []
        onnx = self._order(facts, core).onnx
        there = onnx if onnx.exists() else None
        faults = side_car_faults(side_car, plan, there, facts, self._model)
        if not faults and (side_car.dla_core is None) != (core is None):
            built = "the GPU alone" if core is not None else f"NVDLA core {side_car.dla_core}"
            wanted = f"NVDLA core {core}" if core is not None else "the GPU alone"
            faults = [
                f"built for {built}, and its instance is to run on {wanted}; run `edge-server plan "
                f"build {self._model}`, or correct secondary_devices in the instance_group"
            ]
        return faults

    def _warn(self, plan: Path, facts: DeviceFacts) -> None:
        side_car = read_side_car(plan)
        for caution in cautions(side_car, facts, self._model) if side_car is not None else ():
            log.warning("model %s: %s: %s", self._model, plan, caution)

    def _log_build(self, faults: list[str]) -> None:
        require_path(self._onnx, self._model)
        for fault in faults:
            log.info("model %s: a plan is built: %s", self._model, fault)

    def _order(self, facts: DeviceFacts, core: int | None) -> PlanOrder:
        options = replace(build_options_of(self._config), dla_core=core)
        return PlanOrder(*network_of(self._onnx, options, facts.version), facts, self._model)

    def _progress(self, name: str, facts: DeviceFacts) -> BuildProgress:
        return BuildProgress(self._model, name, facts.tensorrt, self._context.progress)

    def _built(
        self, name: str, facts: DeviceFacts, core: int | None, *, retry: bool = False
    ) -> Path:
        order = self._order(facts, core)
        with self._progress(name, facts) as progress:
            plan, is_new = ensure_plan(order, _cache(), build, progress, retry=retry)
        if is_new:
            self._new.add(plan)
        return plan


def _cache() -> PlanCache:
    return PlanCache(state_directory() / "plans")


READ_TIMEOUT_S = 300.0


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete the configuration from the plan: by its side-car, or else in a separate process,
    as reading a plan without a side-car may crash the process."""
    parameters = check_parameters(files, config, TensorRtParameters, others=True)
    _check_kind(files, config)
    directory = files.versions[version]
    capability = BareGpu().compute_capability if config.message.cc_model_filenames else ""
    plan = directory / plan_name(config, capability)
    side_car = read_side_car(plan)
    if side_car is not None:
        return agreed(files, config, PlanIO(side_car.tensors, side_car.profiles))
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

    options = Options.of(context.config, parameters_of(context.config, TensorRtParameters))
    return PlanModel(context, options, PlanSource(context))


def prepare(context: LoadContext) -> None:
    """Build the plans that `load` would build; see `contract.Prepares`."""
    from edge_server.backends.tensorrt.engine import facts_of  # noqa: PLC0415 - likewise

    source = PlanSource(context)
    for placement in dict.fromkeys(p for g in context.config.instance_groups for p in g.placements):
        source.find(facts_of(context.devices.gpu(placement.gpu or 0)), placement)


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
