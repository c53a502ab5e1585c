"""A cache of plans built on this device, one at a time: two builds would halve each other's memory,
and distort each other's measurements. Every plan can be rebuilt from its ONNX file.

A build takes minutes of the whole board, and systemd starts a daemon that ended again at once: a
note beside a plan's place keeps it from building what has just failed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edge_server.backends.tensorrt.plan_options import (
    SideCar,
    compare,
    encode,
    read_side_car,
    sha256_of,
    side_car_faults,
    side_car_path,
)
from edge_server.backends.tensorrt.plan_process import BuildJob, OnEvent, PlanBuilt, Step
from edge_server.board.board import boot_id
from edge_server.errors import (
    Cancelled,
    EdgeServerError,
    InternalError,
    ModelConfigError,
    Unavailable,
    may_pass,
)
from edge_server.process.disk import atomic_replace, atomic_write, floor_bytes, free_bytes
from edge_server.process.threads import GivenUp, require_wanted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import tensorrt as trt

    from edge_server.backends.tensorrt.plan_options import BuildOptions, DeviceFacts, Profile

log = logging.getLogger(__name__)

PLAN_NAME = "model.plan"
# A plan that is being built, by its name and the process.
_WRITTEN = ".{}.{}.tmp"
MAX_BYTES = 4 << 30
_NO_TIMINGS = Path()
# An abstract socket name: visible without a shared directory, and released with the process.
LOCK_NAME = "\0edge-server-plan-build"
_RETRY_S = 0.5
# Builds a plan: in production `plan_process.build` with its limits.
Build = Callable[[BuildJob, OnEvent], PlanBuilt]


class PlanOrder(NamedTuple):
    """A plan of the network `onnx` for the device of `facts`; `model` is for the messages."""

    onnx: Path
    options: BuildOptions
    facts: DeviceFacts
    model: str


class PlanCache:
    """Plans by ONNX file, options and device; any file may be removed at any time. Of more than
    `max_bytes` the least recently used are removed first. `free` returns the space that is free
    beyond what plans leave on their disk."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int = MAX_BYTES,
        free: Callable[[Path], int] | None = None,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._free = free or _free_bytes

    @property
    def timing_cache(self) -> Path:
        return self._folder / "timing"

    def place(self, order: PlanOrder) -> Path:
        onnx, options, facts, _ = order
        # As in `compare`: a mere caution must not cost a build of minutes.
        l4t = facts.l4t if options.dla_core is not None else ""
        device = (facts.tensorrt, facts.sm, l4t)
        key = hashlib.sha256("\n".join((sha256_of(onnx), options.digest, *device)).encode())
        return self._folder / key.hexdigest()[:32] / PLAN_NAME

    def find(self, order: PlanOrder) -> Path | None:
        plan, model = self.place(order), order.model
        try:
            side_car = read_side_car(plan)
            if side_car is None or not plan.is_file():
                return None
            faults = side_car_faults(side_car, plan, order.onnx, order.facts, model)
        except ModelConfigError as error:
            faults = [str(error)]
        for fault in faults:
            log.warning("plan of model %s: %s is not used: %s", model, plan, fault)
        if faults:
            return None
        # A disk that turned read-only, or another user's plan: the plan is as good.
        with suppress(OSError):
            os.utime(plan.parent)
        return plan

    def forget(self, plan: Path) -> None:
        if plan.parent.parent == self._folder:
            shutil.rmtree(plan.parent, ignore_errors=True)

    def prune(self, keep: Path, room_bytes: int = 0) -> None:
        """Remove plans until the rest fit into `max_bytes`, and onto the disk with `room_bytes`
        more; `keep` stays. The caller holds the build lock: what other builds left goes, too."""
        entries = [e for e in self._folder.iterdir() if side_car_path(e / PLAN_NAME).is_file()]
        sizes = {entry: _size_bytes(entry) for entry in entries}
        total_bytes = sum(sizes.values())
        for left in self._folder.glob(f"*/{_WRITTEN.format(PLAN_NAME, '*')}"):
            left.unlink(missing_ok=True)
        lacking_bytes = room_bytes - self._free(self._folder)
        for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime):
            if total_bytes <= self._max_bytes and lacking_bytes <= 0:
                return
            if entry != keep.parent:
                shutil.rmtree(entry, ignore_errors=True)
                total_bytes -= sizes[entry]
                lacking_bytes -= sizes[entry]
                log.info("plan cache: %s removed, %d MiB", entry.name, sizes[entry] >> 20)

    def make_room(self, plan: Path, onnx: Path) -> None:
        """Make room for `plan`, which is about as large as `onnx`: better now than after minutes.
        Raises Unavailable where the disk is full, of other files than plans."""
        self.prune(plan, onnx.stat().st_size)
        if reason := self.shortage(onnx):
            raise Unavailable(reason)

    def shortage(self, onnx: Path) -> str:
        """Return that the disk has no room for a plan of `onnx`; "" where it has."""
        need, there = (n / (1 << 20) for n in (onnx.stat().st_size, free_bytes(self._folder)))
        if need <= there:
            return ""
        return (
            f"{self._folder}: the disk has {there:.0f} MiB left, and a plan of {onnx.name} takes "
            f"about {need:.0f}; make room there"
        )


@contextmanager
def build_lock(on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the device's build lock; wait while another build holds it, and call `on_wait` once.
    Raises GivenUp of `require_wanted`; InternalError where the system allows no lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        waited = False
        while True:
            try:
                lock.bind(LOCK_NAME)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise InternalError(
                        f"the lock of plan builds, the abstract Unix socket {LOCK_NAME[1:]}, "
                        f"cannot be bound: {error.strerror}; let the service's security profile "
                        "(AppArmor, SELinux) allow it"
                    ) from error
                if not waited:
                    on_wait()
                waited = True
                require_wanted()
                time.sleep(_RETRY_S)
        yield


def ensure_plan(
    order: PlanOrder, cache: PlanCache, build: Build, on_event: OnEvent, *, retry: bool = False
) -> tuple[Path, bool]:
    """Return a plan, from `cache` or built into it, which takes minutes; and whether it was built
    now. One plan is built at a time; after the wait a caller takes the plan that the other build
    has cached, if it fits."""
    if (found := cache.find(order)) is not None:
        return found, False
    plan = cache.place(order)
    onnx, options, facts, model = order
    if not retry:
        check_not_failed(plan, model)
    with build_lock(lambda: on_event(Step("waiting for another build"))):
        if (found := cache.find(order)) is not None:
            return found, False
        if not retry:
            check_not_failed(plan, model)
        try:
            plan.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InternalError(f"{plan.parent}: cannot be made: {error.strerror}") from error
        timings = cache.timing_cache
        cache.make_room(plan, onnx)
        try:
            side_car = make_plan(onnx, plan, options, build, on_event, timing_cache=timings)
        except (Cancelled, GivenUp):
            raise
        except EdgeServerError as error:
            # For want of room nothing is built; with room it may be built at once.
            if not cache.shortage(onnx):
                note_failure(plan, error)
            raise
        with suppress(OSError):
            plan.with_name(_NAME).unlink()
        if faults := compare(side_car, facts, model):
            raise InternalError(
                f"the plan that was just built does not fit: {'; '.join(faults)}. If TensorRT was "
                "updated while this ran, start it again"
            )
        cache.prune(keep=plan)
    return plan, True


def _free_bytes(folder: Path) -> int:
    try:
        return free_bytes(folder) - floor_bytes(folder)
    except OSError:
        return 0


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def timing_path(folder: Path, facts: DeviceFacts) -> Path:
    """Return the path of TensorRT's measurements, which make the next build of the same layers
    quick; they are valid for one TensorRT, GPU and Jetson Linux."""
    parts = (facts.tensorrt, facts.gpu, facts.sm, str(facts.multiprocessors), facts.l4t)
    name = "-".join(part for part in parts if part)
    return folder / f"{re.sub('[^A-Za-z0-9._-]+', '_', name)}.timing"


def read_timings(config: trt.IBuilderConfig, folder: Path, facts: DeviceFacts) -> None:
    """Give `config` the earlier measurements; TensorRT repeats those that do not fit."""
    if folder == _NO_TIMINGS:
        return
    try:
        data = timing_path(folder, facts).read_bytes()
    except OSError:
        data = b""
    cache: trt.ITimingCache | None = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)


def write_timings(config: trt.IBuilderConfig, folder: Path, facts: DeviceFacts) -> None:
    """Store the measurements; a full disk costs only the next build's time."""
    cache: trt.ITimingCache | None = None if folder == _NO_TIMINGS else config.get_timing_cache()
    if cache is None:
        return
    data: trt.IHostMemory = cache.serialize()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(timing_path(folder, facts), bytes(data))
    except OSError:
        return


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
    complete. Each file replaces its predecessor atomically. After a power cut between the two the
    side-car's digest does not match the plan."""
    onnx, plan = onnx.absolute(), plan.absolute()
    written = plan.with_name(_WRITTEN.format(plan.name, os.getpid()))
    onnx_sha256 = sha256_of(onnx)
    job = BuildJob(str(onnx), str(written), options, str(timing_cache or ""))
    try:
        for left in plan.parent.glob(_WRITTEN.format(plan.name, "*")):
            left.unlink(missing_ok=True)
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
        # A read-only file system refuses this too, which would hide the failure.
        with suppress(OSError):
            written.unlink()
    return side_car


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
            shapes = {n: "x".join(map(str, getattr(r, which))) for n, r in profile.items()}
            words.append(f"{flag}={','.join(f'{name}:{shape}' for name, shape in shapes.items())}")
    if options.dla_core is not None:
        words.append(f"--useDLACore={options.dla_core}")
        words += ["--allowGPUFallback"] if options.gpu_fallback else []
    words += [f"--memPoolSize=workspace:{options.workspace_mib}", "--profilingVerbosity=detailed"]
    words.append("--skipInference")
    return shlex.join(words)


# A build that failed for want of memory, or crashed, may succeed later; a boot is later, too.
RETRY_S = 1800.0
_NAME = "failed.json"


class _Failed(msgspec.Struct, frozen=True):
    # The text of the failure, and False where TensorRT refuses the ONNX file or the options.
    reason: str
    may_pass: bool
    # The boot, and the seconds since then.
    boot: str
    at_s: float


def note_failure(plan: Path, error: EdgeServerError) -> None:
    failed = _Failed(str(error), may_pass(error), boot_id(), _now_s())
    with suppress(OSError):
        atomic_write(plan.with_name(_NAME), msgspec.json.encode(failed))


def check_not_failed(plan: Path, model: str) -> None:
    """Check that no build of `plan` has failed that should not be repeated yet. Raises
    ModelConfigError where TensorRT refused the ONNX file or the options; Unavailable less than
    `RETRY_S` after a failure, in this boot."""
    try:
        failed = msgspec.json.decode(plan.with_name(_NAME).read_bytes(), type=_Failed)
    except (OSError, ValueError):
        return
    text = f"model '{model}': no plan, as its build failed: {failed.reason}"
    now = "at once by `systemctl restart edge-server-plans`, which is `edge-server plan refresh`"
    if not failed.may_pass:
        raise ModelConfigError(
            f"{text}\nit is built again when its ONNX file, its options or TensorRT change; {now}"
        )
    left_s = failed.at_s + RETRY_S - _now_s()
    if failed.boot == boot_id() and left_s > 0:
        raise Unavailable(
            f"{text}\nit is built again after {left_s / 60:.0f} min, or after a boot; {now}"
        )


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
