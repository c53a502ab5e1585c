"""Work with TensorRT in a separate process; this module never imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edge_server.backends.tensorrt.plan_build.build_options import BuildOptions  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.plan_build.events import BuildEvent, OnEvent, Working
from edge_server.backends.tensorrt.plan_build.layers import Placed  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.plan_build.profiles import Profile  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.plan_build.side_car import DeviceFacts, PlanTensor
from edge_server.board.resources import read_memory
from edge_server.errors import InternalError, Unavailable
from edge_server.process.run_in_child import (
    ChildFailed,
    ChildOptions,
    ChildTimeout,
    run_in_child,
)

_WHO = "the process that works with TensorRT"
_CHILD = "edge_server.backends.tensorrt.plan_build.child:"
# CUDA and TensorRT take seconds to start, on a busy board many.
_INSPECTION_TIMEOUT_S = 120.0
# A build is killed when the board's available memory falls below this: on a Jetson the GPU
# allocates from the same memory, which no process limit counts.
LEAVE_FREE_BYTES = 256 << 20


class BuildJob(msgspec.Struct, frozen=True):
    """A plan to build.

    Attributes:
        out: the file that the process writes; the parent moves the plan to its place.
        timing_cache: a directory of TensorRT's earlier measurements; empty is none.
    """

    onnx: str
    out: str
    options: BuildOptions
    timing_cache: str = ""


class PlanBuilt(msgspec.Struct, frozen=True):
    """The plan is written; the fields are the data of its side-car."""

    facts: DeviceFacts
    precision: str
    profiles: tuple[Profile, ...]
    tensors: tuple[PlanTensor, ...]
    placed: Placed | None
    build_s: float


def build(
    job: BuildJob,
    on_event: OnEvent,
    memory_limit_bytes: int = 0,
) -> PlanBuilt:
    """Build a plan; takes minutes.

    Args:
        job: the plan to build.
        on_event: called with each event of the process, and about twice a second, on this thread.
        memory_limit_bytes: of the host's memory for the process; 0 is unlimited.

    Raises:
        EdgeServerError: the failure that the process reported.
        Unavailable: the board's available memory fell below `LEAVE_FREE_BYTES`.
    """

    def watch() -> None:
        on_event(Working())
        free_bytes = read_memory(Path("/")).available_bytes
        if free_bytes is not None and free_bytes < LEAVE_FREE_BYTES:
            raise Unavailable(
                f"the build was ended: it left {free_bytes >> 20} MiB of the board's memory, "
                f"and {LEAVE_FREE_BYTES >> 20} shall stay free; end other programs, or "
                "give layers less with --workspace"
            )

    options = ChildOptions(background=True, memory_bytes=memory_limit_bytes)
    try:
        built = run_in_child(
            f"{_CHILD}build",
            job,
            on_event=lambda event: on_event(msgspec.convert(event, BuildEvent)),
            watch=watch,
            options=options,
        )
    except ChildFailed as error:
        raise InternalError(f"{_WHO} {error}") from None
    return msgspec.convert(built, PlanBuilt)


def read_layers(plan: Path, dla_core: int | None) -> str:
    """Return the description of a plan by TensorRT's inspector, in JSON.

    Raises:
        EdgeServerError: the failure that the process reported.
    """
    return str(_inspect("read_layers", str(plan.absolute()), dla_core))


def probe_device(timeout_s: float = _INSPECTION_TIMEOUT_S) -> DeviceFacts:
    """Return the facts of this device; `reason` says why it cannot build or run plans.

    Raises:
        EdgeServerError: the process failed, or exceeded `timeout_s`.
    """
    return msgspec.convert(_inspect("probe_device", timeout_s=timeout_s), DeviceFacts)


def _inspect(function: str, *arguments: object, timeout_s: float = _INSPECTION_TIMEOUT_S) -> Any:
    try:
        return run_in_child(_CHILD + function, *arguments, timeout_s=timeout_s)
    except ChildTimeout as error:
        raise Unavailable(f"{_WHO} {error}") from None
    except ChildFailed as error:
        raise InternalError(f"{_WHO} {error}") from None
