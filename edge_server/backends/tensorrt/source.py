"""Choose the plan for a placement: the one in the version directory, or one built now.

Nothing here imports TensorRT: `plan refresh` chooses plans on machines without it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.plan_cache import (
    PlanCache,
    build_lock,
    ensure_plan,
    make_plan,
)
from edge_server.backends.tensorrt.plan_config import (
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
from edge_server.errors import ModelConfigError, Unavailable
from edge_server.model_config.files import reading, require_path
from edge_server.process.disk import state_directory

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.contract import ProgressCallback
    from edge_server.backends.tensorrt.plan_config import TensorRtParameters
    from edge_server.backends.tensorrt.plan_options import BuildOptions, DeviceFacts
    from edge_server.model_config.config import ModelConfig, Placement

log = logging.getLogger(__name__)

ONNX_NAME = "model.onnx"


class PlanSource:
    """Finds the plan of one model version.

    A plan's side-car must match this device and the placement; a plan without a side-car is left to
    TensorRT to judge. With `auto_build`, a plan that does not fit or is missing is built from the
    ONNX file beside it, in a separate process, and cached. Nothing here imports TensorRT.

    Args:
        builds: False refuses to build, for a load that must not take minutes.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        parameters: TensorRtParameters,
        on_progress: ProgressCallback,
        *,
        builds: bool = True,
    ) -> None:
        self._builds = builds
        self._model = config.name
        self._config = config
        self._parameters = parameters
        self._on_progress = on_progress
        self._directory = directory
        self._onnx = directory / ONNX_NAME
        self._new: set[Path] = set()

    def find(
        self, facts: DeviceFacts, placement: Placement, *, retry: bool = False
    ) -> tuple[Path, int | None]:
        """Return the plan for `placement` on the device of `facts`, and the NVDLA core to load it
        for; None is the GPU.

        Raises:
            ModelConfigError: no plan fits; the text gives the reason and the remedy.
            Unavailable: the NVDLA core does not exist, or a plan could not, or may not, be built
                now.
        """
        plan, core, faults = self._check(facts, placement)
        if not faults:
            self._warn(plan, facts)
            return plan, core
        if not self._parameters.auto_build:
            raise ModelConfigError("\n".join(f"{plan}: {fault}" for fault in faults))
        if not self._builds:
            cached = self._cached(facts, core)
            if cached is None:
                raise Unavailable(f"plan building: {plan}: {faults[0]}")
            return cached, core
        self._log_build(faults)
        built = self._built(plan.name, facts, core, retry=retry)
        self._warn(built, facts)
        return built, core

    def refresh(self, facts: DeviceFacts, placement: Placement) -> tuple[Path, bool]:
        """Return a plan that fits `placement`, and whether it was built now.

        With `auto_build` it is the one that `find` will return, from the cache; otherwise it is
        built in the version directory.
        """
        if self._parameters.auto_build:
            plan, _ = self.find(facts, placement, retry=True)
            return plan, plan in self._new
        plan, core, faults = self._check(facts, placement)
        if not faults:
            return plan, False
        self._log_build(faults)
        onnx, options = self._network(facts, core)
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
        matches.

        Raises:
            ModelConfigError: no ONNX file is there to build from, or the plan was built just now.
            Unavailable: the plan could not be built now.
        """
        if not self._parameters.auto_build or refused in self._new:
            raise why
        require_path(self._onnx, self._model)
        _cache().forget(refused)
        if not self._builds:
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
        onnx, _ = self._network(facts, core)
        there = onnx if onnx.exists() else None
        faults = side_car_faults(side_car, plan, there, facts, self._model)
        if not faults and (side_car.dla_core is None) != (core is None):
            built = "the GPU alone" if core is not None else f"NVDLA core {side_car.dla_core}"
            wanted = f"NVDLA core {core}" if core is not None else "the GPU alone"
            faults = [
                f"built for {built}, and its instance is to run on {wanted}; run `edge-server plan "
                f"build {self._model}`, or mend secondary_devices in the instance_group"
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

    def _cached(self, facts: DeviceFacts, core: int | None) -> Path | None:
        require_path(self._onnx, self._model)
        onnx, options = self._network(facts, core)
        return _cache().find(onnx, options, facts, self._model)

    def _network(self, facts: DeviceFacts, core: int | None) -> tuple[Path, BuildOptions]:
        options = replace(build_options_of(self._config), dla_core=core)
        return network_of(self._onnx, options, facts.version)

    def _progress(self, name: str, facts: DeviceFacts) -> BuildProgress:
        return BuildProgress(self._model, name, facts.tensorrt, self._on_progress)

    def _built(
        self, name: str, facts: DeviceFacts, core: int | None, *, retry: bool = False
    ) -> Path:
        onnx, options = self._network(facts, core)
        with self._progress(name, facts) as progress:
            plan, is_new = ensure_plan(
                onnx,
                options,
                facts,
                _cache(),
                build,
                model=self._model,
                on_event=progress,
                retry=retry,
            )
        if is_new:
            self._new.add(plan)
        return plan


def _cache() -> PlanCache:
    return PlanCache(state_directory() / "plans")
