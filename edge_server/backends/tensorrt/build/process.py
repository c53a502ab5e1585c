"""Work with TensorRT in a separate process; this module never imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.backends.tensorrt.build.build_options import BuildOptions  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.events import BuildEvent, OnEvent, Working
from edge_server.backends.tensorrt.build.layers import Placed  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.profiles import Profile  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.side_car import DeviceFacts, PlanTensor
from edge_server.board.resources import read_memory
from edge_server.errors import Cancelled, InternalError, Unavailable
from edge_server.process.run_in_child import (
    ChildFailed,
    ChildOptions,
    ChildTimeout,
    run_in_child,
)

if TYPE_CHECKING:
    import threading

_WHO = "the process that works with TensorRT"
_CHILD = "edge_server.backends.tensorrt.build.child:"
# CUDA and TensorRT take seconds to start, on a busy board many.
_INSPECTION_TIMEOUT_S = 120.0


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


@dataclass(frozen=True)
class BuildLimits:
    """Memory limits of a build process.

    Attributes:
        memory_bytes: of the host's memory; 0 is unlimited.
        leave_free_bytes: the process is killed when the board's available memory falls below this.
            On a Jetson the GPU allocates from the same memory, which no process limit counts.
    """

    memory_bytes: int = 0
    leave_free_bytes: int = 256 << 20


USUAL_LIMITS = BuildLimits()


def build(
    job: BuildJob,
    on_event: OnEvent,
    limits: BuildLimits = USUAL_LIMITS,
    stop: threading.Event | None = None,
) -> PlanBuilt:
    """Build a plan; takes minutes.

    Args:
        job: the plan to build.
        on_event: called with each event of the process, and about twice a second, on this thread.
        limits: of the process's memory.
        stop: kills the process when set.

    Raises:
        EdgeServerError: the failure that the process reported.
        Cancelled: `stop` was set.
    """

    def watch() -> None:
        on_event(Working())
        if stop is not None and stop.is_set():
            raise Cancelled("the build was ended before it was through")
        free_bytes = read_memory(Path("/")).available_bytes
        if free_bytes is not None and free_bytes < limits.leave_free_bytes:
            raise Unavailable(
                f"the build was ended: it left {free_bytes >> 20} MiB of the board's memory, "
                f"and {limits.leave_free_bytes >> 20} shall stay free; end other programs, or "
                "give layers less with --workspace"
            )

    options = ChildOptions(background=True, memory_bytes=limits.memory_bytes)
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
