"""Build a plan from an ONNX file and publish it together with its side-car."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.build.events import OnEvent
from edge_server.backends.tensorrt.build.process import BuildJob, PlanBuilt
from edge_server.backends.tensorrt.build.side_car import SideCar, encode, sha256_of, side_car_path
from edge_server.errors import InternalError, ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edge_server.backends.tensorrt.build.build_options import BuildOptions, Shape
    from edge_server.backends.tensorrt.build.profiles import Profile

# Builds a plan: in production `process.build` with its limits.
Build = Callable[[BuildJob, OnEvent], PlanBuilt]


def make_plan(
    onnx: Path,
    plan: Path,
    options: BuildOptions,
    build: Build,
    on_event: OnEvent,
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
    beside = plan.with_name(f".{plan.name}.json.{os.getpid()}.tmp")
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
        beside.write_bytes(encode(side_car))
        _replace(written, plan)
        _replace(beside, side_car_path(plan))
    except OSError as error:
        raise InternalError(
            f"{error.filename or plan}: cannot be written: {error.strerror or error}"
        ) from error
    finally:
        written.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
    return side_car


def _clear(plan: Path) -> None:
    """Remove the temporary files of killed builds."""
    for left in plan.parent.glob(f".{plan.name}.*.tmp"):
        left.unlink(missing_ok=True)


def trtexec_line(
    onnx: Path,
    plan: Path,
    options: BuildOptions,
    profiles: Sequence[Profile],
    version: tuple[int, int],
) -> str:
    """Return the command line of the same build; trtexec cannot calibrate from samples."""
    words = ["trtexec", f"--onnx={onnx}", f"--saveEngine={plan}"]
    if version < (11, 0):
        words += {"fp32": [], "fp16": ["--fp16"], "int8": ["--int8", "--fp16"]}[options.precision]
        if options.strongly_typed and version >= (10, 0):
            words.append("--stronglyTyped")
    for index, profile in enumerate(profiles):
        if len(profiles) > 1:
            words.append(f"--profile={index}")
        for flag, which in (("--minShapes", "min"), ("--optShapes", "opt"), ("--maxShapes", "max")):
            shapes = ",".join(
                f"{name}:{_text(getattr(found, which))}" for name, found in profile.items()
            )
            words.append(f"{flag}={shapes}")
    if options.dla_core is not None:
        words.append(f"--useDLACore={options.dla_core}")
        words += ["--allowGPUFallback"] if options.gpu_fallback else []
    words += [f"--memPoolSize=workspace:{options.workspace_mib}", "--profilingVerbosity=detailed"]
    words.append("--skipInference")
    return shlex.join(words)


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _replace(written: Path, path: Path) -> None:
    """Atomically and durably replace `path` by `written`, also across a power cut."""
    _sync(written)
    written.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
