"""`edge-server plan inspect`: prints the side-car as text, and the engine's own layers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from edge_server.backends.tensorrt.plan_options import (
    cautions,
    encode,
    io_names,
    layer_table,
    plan_faults,
    read_side_car,
    side_car_path,
)
from edge_server.backends.tensorrt.plan_process import probe_device, read_layers
from edge_server.errors import EdgeServerError, ModelConfigError, Unavailable
from edge_server.model_config.files import reading, require_path
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.backends.tensorrt.plan_options import PlanTensor, SideCar
    from edge_server.cli.plan.target import Target


def inspect(target: Target, *, layers: bool, as_json: bool) -> Iterator[str]:
    """Yield the side-car of the plan of `target`, a line per fact.

    Raises:
        ModelConfigError: the plan or its side-car is missing.
        Unavailable: `layers` is set, and this device cannot read them.
    """
    with reading(target.plan):
        if not target.plan.exists():
            raise ModelConfigError(
                f"{target.plan}: missing; run `edge-server plan build {target.name}` on the device"
            )
    require_path(target.plan, target.name)
    side_car = read_side_car(target.plan)
    if side_car is None:
        raise ModelConfigError(
            f"{side_car_path(target.plan)}: missing, so nothing is known of {target.plan.name}; "
            f"run `edge-server plan build {target.name}`"
        )
    if as_json:
        yield encode(side_car).decode().rstrip()
        return
    yield from _summary(side_car)
    yield from _fit(target)
    if layers:
        yield from _layers(target, side_car)


def _summary(side_car: SideCar) -> Iterator[str]:
    built = side_car.built_with
    yield f"plan       sha256 {side_car.plan_sha256}"
    yield f"ONNX       sha256 {side_car.onnx_sha256}"
    yield f"built with TensorRT {built.tensorrt} in {side_car.build_s:.1f} s"
    if built.sm:
        yield f"GPU        {built.gpu}, {built.sm}, {built.multiprocessors} multiprocessors"
    if built.l4t:
        yield f"L4T        {built.l4t}"
    core = "" if side_car.dla_core is None else f", NVDLA core {side_car.dla_core}"
    yield f"precision  {side_car.precision}{core}"
    if side_car.placed is not None:
        yield f"layers     {side_car.placed}"
    for tensor in side_car.tensors:
        yield f"{'input' if tensor.is_input else 'output':10} {_tensor(tensor)}"
    for index, profile in enumerate(side_car.profiles):
        for name, found in profile.items():
            bounds = " ".join(shape_text(s) for s in (found.min, found.opt, found.max))
            yield f"profile {index}  {name}: {bounds}"
    yield f"trtexec    {side_car.trtexec}"


def _tensor(tensor: PlanTensor) -> str:
    parts = [f"{tensor.name}: {tensor.datatype} {shape_text(tensor.shape)}"]
    parts += ["holds a shape"] if tensor.holds_shape else []
    return ", ".join([*parts, *([tensor.format] if tensor.format else [])])


def _fit(target: Target) -> Iterator[str]:
    """Yield whether the plan runs here, or why that cannot be determined."""
    try:
        facts = probe_device()
    except EdgeServerError as error:
        yield f"here       unknown: {error}"
        return
    if facts.reason:
        yield f"here       does not run: {facts.reason}"
        return
    onnx = target.onnx if target.onnx.exists() else None
    reasons = plan_faults(target.plan, onnx, facts, target.name)
    yield from (f"here       does not run: {reason}" for reason in reasons)
    if not reasons:
        yield "here       runs"
        side_car = read_side_car(target.plan)
        for caution in cautions(side_car, facts, target.name) if side_car is not None else ():
            yield f"here       caution: {caution}"


def _layers(target: Target, side_car: SideCar) -> Iterator[str]:
    facts = probe_device()
    if facts.reason:
        raise Unavailable(f"the layers are read by TensorRT, on the device: {facts.reason}")
    print("reading the engine …", file=sys.stderr)
    information = read_layers(target.plan, side_car.dla_core)
    yield f"tensors    {', '.join(io_names(information))}"
    yield from layer_table(information)
