"""Jobs and events of the process that works with TensorRT: one JSON object a line."""

from __future__ import annotations

from typing import Union

import msgspec

from edge_server.backends.tensorrt.build.facts import DeviceFacts  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.layers import Placed  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.profiles import Profile  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.side_car import PlanTensor  # noqa: TC001 - msgspec
from edge_server.backends.tensorrt.build.build_options import BuildOptions  # noqa: TC001 - msgspec


class BuildJob(msgspec.Struct, frozen=True, tag="build"):
    """Build a plan.

    Attributes:
        out: the file that the process writes; the parent moves the plan to its place.
        timing_cache: a directory of TensorRT's earlier measurements; empty is none.
    """

    onnx: str
    out: str
    options: BuildOptions
    timing_cache: str = ""


class LookJob(msgspec.Struct, frozen=True, tag="look"):
    """Load a plan and report its layers."""

    plan: str
    dla_core: int | None = None


class FactsJob(msgspec.Struct, frozen=True, tag="facts"):
    """Report the facts of the device."""


Job = Union[BuildJob, LookJob, FactsJob]  # noqa: UP007 - msgspec reads it on Python 3.10


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A part of the work has begun."""

    what: str


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of the build: 0 to 1, never back; `phase` is TensorRT's own name."""

    fraction: float
    phase: str


class TrtMessage(msgspec.Struct, frozen=True, tag="said"):
    """A line of TensorRT's log; `level` is ERROR, WARNING or INFO."""

    level: str
    text: str


class Working(msgspec.Struct, frozen=True, tag="working"):
    """The process is alive and at work, without anything new to report."""


class PlanBuilt(msgspec.Struct, frozen=True, tag="built"):
    """The plan is written; the fields are the data of its side-car."""

    facts: DeviceFacts
    precision: str
    profiles: tuple[Profile, ...]
    tensors: tuple[PlanTensor, ...]
    placed: Placed | None
    build_s: float


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """The inspector's description of an engine, in TensorRT's JSON."""

    information: str


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The facts of the device."""

    facts: DeviceFacts


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The job failed; `kind` is the name of one of our errors."""

    text: str
    kind: str = "InternalError"


Event = Union[Step, Progressed, Working, TrtMessage, PlanBuilt, Looked, Found, Failed]  # noqa: UP007 - likewise
