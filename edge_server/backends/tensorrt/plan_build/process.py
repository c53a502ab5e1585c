"""Work with TensorRT in a separate process, which may crash, or be killed at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.backends.tensorrt.plan_build.events import (
    BuildEvent,
    BuildJob,
    OnEvent,
    PlanBuilt,
    TrtMessage,
    Working,
)
from edge_server.backends.tensorrt.plan_build.side_car import DeviceFacts, device_facts
from edge_server.board.resources import read_memory
from edge_server.errors import Cancelled, InternalError, Unavailable
from edge_server.gpu.libcuda import BareGpu
from edge_server.process.run_in_child import (
    ChildFailed,
    ChildOptions,
    ChildStopped,
    ChildTimeout,
    run_in_child,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_WHO = "the process that works with TensorRT"
_CHILD = "edge_server.backends.tensorrt.plan_build.process:"
# CUDA and TensorRT take seconds to start, on a busy board many.
_INSPECTION_TIMEOUT_S = 120.0
# A build is killed when the board's available memory falls below this: on a Jetson the GPU
# allocates from the same memory, which no process limit counts.
LEAVE_FREE_BYTES = 256 << 20


def build(job: BuildJob, on_event: OnEvent, memory_limit_bytes: int = 0) -> PlanBuilt:
    """Build a plan; takes minutes.

    Args:
        job: the plan to build.
        on_event: called with each event of the process, and about twice a second, on this thread.
        memory_limit_bytes: of the host's memory for the process; 0 is unlimited.

    Raises:
        EdgeServerError: the failure that the process reported.
        Cancelled: the process was asked to end.
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
            f"{_CHILD}build_in_child",
            job,
            on_event=lambda event: on_event(msgspec.convert(event, BuildEvent)),
            watch=watch,
            options=options,
        )
    except ChildStopped as error:
        raise Cancelled(f"{_WHO} {error}") from None
    except ChildFailed as error:
        raise InternalError(f"{_WHO} {error}") from None
    return msgspec.convert(built, PlanBuilt)


def read_layers(plan: Path, dla_core: int | None) -> str:
    """Return the description of a plan by TensorRT's inspector, in JSON.

    Raises:
        EdgeServerError: the failure that the process reported.
    """
    return str(_inspect("layers_in_child", str(plan.absolute()), dla_core))


def probe_device(timeout_s: float = _INSPECTION_TIMEOUT_S) -> DeviceFacts:
    """Return the facts of this device; `reason` says why it cannot build or run plans.

    Raises:
        EdgeServerError: the process failed, or exceeded `timeout_s`.
    """
    return msgspec.convert(_inspect("device_in_child", timeout_s=timeout_s), DeviceFacts)


def _inspect(function: str, *arguments: object, timeout_s: float = _INSPECTION_TIMEOUT_S) -> Any:
    try:
        return run_in_child(_CHILD + function, *arguments, timeout_s=timeout_s)
    except ChildTimeout as error:
        raise Unavailable(f"{_WHO} {error}") from None
    except ChildFailed as error:
        raise InternalError(f"{_WHO} {error}") from None


def device_in_child() -> DeviceFacts:
    """Return the facts of this device; `reason` says what is missing of GPU and TensorRT."""
    return _device()[1]


def build_in_child(send: Callable[[BuildEvent], None], job: dict[str, Any]) -> PlanBuilt:
    gpu, facts = _device()
    if not facts.tensorrt:
        raise Unavailable(facts.reason)
    # These modules import TensorRT.
    from edge_server.backends.tensorrt.engine import trt_log  # noqa: PLC0415
    from edge_server.backends.tensorrt.plan_build.builder import build_plan  # noqa: PLC0415

    trt_log().on_message = lambda level, text: send(TrtMessage(level, text))
    return build_plan(msgspec.convert(job, BuildJob), facts, gpu, send)


def layers_in_child(plan: str, dla_core: int | None) -> str:
    facts = device_in_child()
    if facts.reason:
        raise Unavailable(facts.reason)
    from edge_server.backends.tensorrt.plan_build.builder import information  # noqa: PLC0415

    return information(Path(plan).read_bytes(), dla_core)


def _device() -> tuple[BareGpu | None, DeviceFacts]:
    gpu, reason = None, ""
    try:
        gpu = BareGpu()
    except Unavailable as error:
        reason = str(error)
    try:
        # TensorRT may be missing, which is a normal state.
        import tensorrt as trt  # noqa: PLC0415

        from edge_server.backends.tensorrt.engine import dla_cores  # noqa: PLC0415
    except ImportError as error:
        missing = f"no TensorRT here: {error}; on a Jetson: apt install python3-libnvinfer"
        return gpu, device_facts(gpu, "", 0, f"{reason}; {missing}".removeprefix("; "))
    # A Runtime made without a driver crashes.
    return gpu, device_facts(gpu, trt.__version__, dla_cores() if gpu else 0, reason)
