"""What the process of `plan_process` runs: `run_in_child` finds these functions by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edge_server.backends.tensorrt.plan_options import DeviceFacts, device_facts
from edge_server.backends.tensorrt.plan_process import BuildJob, OnEvent, PlanBuilt, TrtMessage
from edge_server.errors import Unavailable
from edge_server.gpu.device import Gpu


def device_in_child() -> DeviceFacts:
    """Return the facts of this device; `reason` says what is missing of GPU and TensorRT."""
    return _device()[1]


def build_in_child(send: OnEvent, job: dict[str, Any]) -> PlanBuilt:
    gpu, facts = _device()
    if not facts.tensorrt:
        raise Unavailable(facts.reason)
    # These modules import TensorRT.
    from edge_server.backends.tensorrt.engine import trt_log  # noqa: PLC0415
    from edge_server.backends.tensorrt.plan_builder import build_plan  # noqa: PLC0415

    trt_log().on_message = lambda level, text: send(TrtMessage(level, text))
    return build_plan(msgspec.convert(job, BuildJob), facts, gpu, send)


def layers_in_child(plan: str, dla_core: int | None) -> str:
    facts = device_in_child()
    if facts.reason:
        raise Unavailable(facts.reason)
    from edge_server.backends.tensorrt.plan_builder import information  # noqa: PLC0415

    return information(Path(plan).read_bytes(), dla_core)


def _device() -> tuple[Gpu | None, DeviceFacts]:
    gpu, reason = None, ""
    try:
        gpu = Gpu()
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
