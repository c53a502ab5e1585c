"""`edge-server plan build`: builds a plan with a progress bar and prints a summary."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from edge_server.backends.tensorrt.plan_cache import PlanCache, build_lock, make_plan
from edge_server.backends.tensorrt.plan_options import given_profiles
from edge_server.backends.tensorrt.plan_process import Progressed, Step, TrtMessage, build
from edge_server.cli.plan.target import require_onnx
from edge_server.errors import InvalidRequest, Unavailable
from edge_server.process.disk import state_directory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge_server.backends.tensorrt.plan_options import BuildOptions, SideCar
    from edge_server.backends.tensorrt.plan_process import (
        BuildEvent,
        BuildJob,
        OnEvent,
        PlanBuilt,
    )
    from edge_server.cli.plan.target import Target

_WIDTH = 24
_COLUMNS = 78


def build_for_people(target: Target, arguments: argparse.Namespace) -> None:
    """Build the plan of `target` with the options of its configuration and `arguments`.

    Raises:
        EdgeServerError: the build failed, and an existing plan is unchanged.
    """
    require_onnx(target)
    options = requested_options(target.options, arguments)
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
            side_car = make_plan(target.onnx, plan, options, run, bar, timing_cache=timing_cache)
    finally:
        bar.close()
    for line in _summary(target, plan, side_car, options):
        print(line)
    if bar.warnings and not arguments.verbose:
        print(f"TensorRT warned {bar.warnings} times; --verbose shows it")


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

    def __init__(
        self,
        *,
        verbose: bool,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verbose = verbose
        self._file = file or sys.stderr
        self._on_terminal = self._file.isatty()
        self._now = now
        self._began = now()
        self._what, self._shown = "starting", ""
        self._fraction: float | None = None
        self.warnings = 0

    def __call__(self, event: BuildEvent) -> None:
        if isinstance(event, TrtMessage):
            self._show_message(event)
            return
        if isinstance(event, Step):
            self._what, self._fraction = event.what, None
            if not self._on_terminal:
                print(f"{event.what} …", file=self._file, flush=True)
        elif isinstance(event, Progressed):
            self._fraction = event.fraction
            self._what = event.phase.lower()
        self._draw()

    def close(self) -> None:
        """Clear the line."""
        if self._on_terminal:
            print("\r\033[K", end="", file=self._file, flush=True)

    def _show_message(self, event: TrtMessage) -> None:
        self.warnings += event.level == "WARNING"
        if self._verbose:
            self.close()
            print(f"TensorRT {event.level}: {event.text}", file=self._file, flush=True)

    def _draw(self) -> None:
        if not self._on_terminal:
            return
        took_s = self._now() - self._began
        bar = "" if self._fraction is None else f"{self._bar(self._fraction)} "
        line = f"{bar}{self._what}, {took_s:.0f} s"[:_COLUMNS]
        if line != self._shown:
            self._shown = line
            print(f"\r\033[K{line}", end="", file=self._file, flush=True)

    @staticmethod
    def _bar(fraction: float) -> str:
        full = round(fraction * _WIDTH)
        return f"[{'#' * full}{'.' * (_WIDTH - full)}] {100 * fraction:3.0f} %"
