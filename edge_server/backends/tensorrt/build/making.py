"""Build a plan from an ONNX file and publish it together with its side-car."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.errors import InternalError, ModelConfigError
from edge_server.backends.tensorrt.build.messages import BuildJob, PlanBuilt, Event
from edge_server.backends.tensorrt.build.side_car import SideCar, encode, sha256_of, side_car_path
from edge_server.backends.tensorrt.build.trtexec import trtexec_line
from edge_server.process.disk import atomic_replace, atomic_write

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.tensorrt.build.build_options import BuildOptions

# Builds a plan: in production `process.build` with its limits.
Build = Callable[[BuildJob, Callable[[Event], None]], PlanBuilt]


def make_plan(
    onnx: Path,
    plan: Path,
    options: BuildOptions,
    build: Build,
    on_event: Callable[[Event], None],
    *,
    timing_cache: Path | None = None,
) -> SideCar:
    """Build `plan` from `onnx` and write its side-car; the earlier plan stays until both are
    complete.

    Each file replaces its predecessor atomically. A power cut may fall between the two: the
    side-car's digest then no longer matches the plan.

    Raises:
        EdgeServerError: no plan was built, and the earlier files are unchanged.
    """
    onnx, plan = onnx.absolute(), plan.absolute()
    written = plan.with_name(f".{plan.name}.{os.getpid()}.tmp")
    onnx_sha256 = sha256_of(onnx)
    job = BuildJob(str(onnx), str(written), options, str(timing_cache or ""))
    try:
        _clear(plan)
        # A read-only directory fails now, not after minutes.
        written.touch()
        built = build(job, on_event)
        if sha256_of(onnx) != onnx_sha256:
            raise ModelConfigError(f"{onnx}: was changed while it was built; build it again")
        side_car = SideCar(
            onnx_sha256=onnx_sha256,
            plan_sha256=sha256_of(written),
            options=options.digest,
            built_with=replace(built.facts, reason=""),
            precision=built.precision,
            dla_core=options.dla_core,
            profiles=built.profiles,
            tensors=built.tensors,
            placed=built.placed,
            trtexec=trtexec_line(onnx, plan, options, built.profiles, built.facts.version),
            build_s=built.build_s,
        )
        atomic_replace(written, plan)
        atomic_write(side_car_path(plan), encode(side_car))
    except OSError as error:
        raise InternalError(
            f"{error.filename or plan}: cannot be written: {error.strerror or error}"
        ) from error
    finally:
        written.unlink(missing_ok=True)
    return side_car


def _clear(plan: Path) -> None:
    """Remove the temporary files of killed builds."""
    for left in plan.parent.glob(f".{plan.name}.*.tmp"):
        left.unlink(missing_ok=True)
