"""Work with TensorRT in a process that may crash, or be killed at any moment: its job, its events,
its result, and the functions `…_in_child` that it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec

from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    DeviceFacts,
    Placed,
    PlanTensor,
    Profile,
    device_facts,
)
from edge_server.board.resources import read_memory
from edge_server.errors import Cancelled, InternalError, Unavailable
from edge_server.gpu.device import BareGpu
from edge_server.process.child import (
    ChildFailed,
    ChildOptions,
    ChildStopped,
    ChildTimeout,
    run_in_child,
)

if TYPE_CHECKING:
    from edge_server.backends.contract import ProgressCallback

log = logging.getLogger(__name__)

_LOGGED_EVERY = 0.1
_REPORT_EVERY_S = 1.0
_STEP_PERCENT = 5
# TensorRT's phase names may list many layers.
_LONGEST_PHASE = 80


class BuildJob(msgspec.Struct, frozen=True):
    """A plan to build. The parent moves it from `out` to its place; `timing_cache` is a directory
    of TensorRT's earlier measurements; empty is none."""

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


class Step(msgspec.Struct, frozen=True, tag="step"):
    what: str


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of the build: 0 to 1, never back; `phase` is TensorRT's own name."""

    fraction: float
    phase: str


class TrtMessage(msgspec.Struct, frozen=True, tag="message"):
    """A line of TensorRT's log; `level` is ERROR, WARNING or INFO."""

    level: str
    text: str


BuildEvent = Union[Step, Progressed, TrtMessage]  # noqa: UP007 - msgspec on Python 3.10
OnEvent = Callable[[BuildEvent], None]


@dataclass
class _Phase:
    parent: str
    steps: int
    done: int = 0


class PhaseTree:
    """Phases by name; a step of a phase may be a phase itself. One that starts again begins at 0,
    and its nested phases have ended."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._most = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self.finish(name)
        self._phases[name] = _Phase(parent if parent in self._phases else "", max(1, steps))

    def step(self, name: str, step: int) -> None:
        if name in self._phases:
            phase = self._phases[name]
            phase.done = min(max(phase.done, step + 1), phase.steps)

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)
        for child in [n for n, phase in self._phases.items() if phase.parent == name]:
            self.finish(child)

    @property
    def fraction(self) -> float:
        """Return the progress of the first phase, 0 to 1; it never goes back."""
        root = next((n for n, phase in self._phases.items() if not phase.parent), None)
        if root is not None:
            self._most = max(self._most, self._of(root))
        return self._most

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        inner = max((self._of(n) for n, p in self._phases.items() if p.parent == name), default=0.0)
        return min(1.0, (phase.done + inner) / phase.steps)


class BuildProgress:
    """Reports each step of a build, and its progress: the log gets a line per tenth, `on_progress`
    a text per twentieth, and a changed phase at most once a second. The end of the `with` block
    reports the empty text."""

    def __init__(
        self,
        model: str,
        plan: str,
        tensorrt: str,
        on_progress: ProgressCallback,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._what = f"{plan} with TensorRT {'.'.join(tensorrt.split('.')[:2])}"
        self._on_progress = on_progress
        self._now = now
        self._logged_next = 0.0
        self._step = -1
        self._reported_at_s = 0.0
        self._text = ""

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            self._on_progress("")

    def __call__(self, event: BuildEvent) -> None:
        if isinstance(event, Step):
            log.info("model %s: plan: %s", self._model, event.what)
            self._report(f"{self._what}: {event.what}")
        elif isinstance(event, Progressed):
            if event.fraction >= self._logged_next:
                log.info("model %s: plan: %.0f %% built", self._model, 100 * event.fraction)
                self._logged_next = event.fraction + _LOGGED_EVERY
            self._progressed(event)

    def _progressed(self, event: Progressed) -> None:
        percent = round(100 * event.fraction)
        phase = event.phase[:_LONGEST_PHASE]
        text = f"building {self._what}: {percent} % ({phase})"
        step = percent // _STEP_PERCENT
        is_due = step > self._step or self._now() - self._reported_at_s >= _REPORT_EVERY_S
        if is_due and text != self._text:
            self._step = step
            self._report(text)

    def _report(self, text: str) -> None:
        self._text, self._reported_at_s = text, self._now()
        self._on_progress(text)


_WHO = "the process that works with TensorRT"
_CHILD = "edge_server.backends.tensorrt.plan_process:"
# CUDA and TensorRT take seconds to start, on a busy board many.
_INSPECTION_TIMEOUT_S = 120.0
# A build is killed when the board's available memory falls below this: on a Jetson the GPU
# allocates from the same memory, which no process limit counts.
LEAVE_FREE_BYTES = 256 << 20


def build(job: BuildJob, on_event: OnEvent, memory_limit_bytes: int = 0) -> PlanBuilt:
    """Build a plan; takes minutes. `on_event` is called with each event of the process, on this
    thread. Raises EdgeServerError: what the process reported; Cancelled where it was asked to end;
    Unavailable where the board's memory fell below `LEAVE_FREE_BYTES`."""

    def watch() -> None:
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
    return str(_inspect("layers_in_child", str(plan.absolute()), dla_core))


def probe_device(timeout_s: float = _INSPECTION_TIMEOUT_S) -> DeviceFacts:
    """Return the facts of this device; `reason` says why it cannot build or run plans."""
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
