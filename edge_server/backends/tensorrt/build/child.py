"""The process that runs TensorRT for the daemon: it may crash, or be killed at any moment.

    python -m edge_server.backends.tensorrt.build.child EVENTS LIFELINE MEMORY_BYTES  <job

The first two are inherited descriptors, `job` is JSON. The process has the lowest priority, and is
the first that the kernel kills when memory runs out. Only
`edge_server.backends.tensorrt.build.process` starts it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from edge_server.gpu.bare_gpu import BareGpu
from edge_server.errors import EdgeServerError, Unavailable
from edge_server.backends.tensorrt.build.facts import DeviceFacts, full_version, l4t_release
from edge_server.backends.tensorrt.build.messages import (
    BuildJob,
    Event,
    FactsJob,
    Failed,
    Found,
    Job,
    Looked,
    LookJob,
    Progressed,
)

_LAST = 19
_BETWEEN_S = 0.1


def main(arguments: list[str]) -> None:
    events, lifeline, memory_bytes = map(int, arguments)
    _die_with_parent(lifeline)
    _give_way(memory_bytes)
    out = _Events(events)
    # `-m` put the directory of edge_server at the front of sys.path.
    if sys.path[0] == str(Path.cwd()):
        del sys.path[0]
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        out.send(_work(job, out))
    except EdgeServerError as error:
        out.send(Failed(str(error), type(error).__name__))
    except MemoryError:
        out.send(Failed("its limit of memory was not enough", "Unavailable"))
    except Exception as error:  # noqa: BLE001 - reported to the parent
        out.send(Failed(f"unexpected {type(error).__name__}: {error}"))
    # Some of TensorRT's classes crash at the interpreter's shutdown.
    os._exit(0)


def _work(job: Job, out: _Events) -> Event:
    try:
        gpu, no_gpu = BareGpu(), ""
    except Unavailable as error:
        gpu, no_gpu = None, str(error)
    try:
        import tensorrt as trt  # noqa: PLC0415 - TensorRT may be missing, which is a normal state
    except ImportError as error:
        reason = f"no TensorRT here: {error}; on a Jetson: apt install python3-libnvinfer"
        if isinstance(job, FactsJob):
            return Found(_facts("", gpu, 0, f"{no_gpu}; {reason}".removeprefix("; ")))
        raise Unavailable(reason) from error
    # These modules import TensorRT at their top.
    from edge_server.backends.tensorrt.build import builder, engine, logger  # noqa: PLC0415

    log = logger.BuildLog(out.send)
    # A Runtime made without a driver crashes.
    cores = engine.dla_cores(log) if gpu is not None else 0
    facts = _facts(full_version(trt.__version__), gpu, cores, no_gpu)
    if isinstance(job, BuildJob):
        return builder.build_plan(job, facts, gpu, log, out.send)
    if isinstance(job, LookJob):
        if gpu is None:
            raise Unavailable(no_gpu)
        return Looked(engine.information(Path(job.plan).read_bytes(), job.dla_core, log))
    return Found(facts)


def _facts(tensorrt: str, gpu: BareGpu | None, dla_cores: int, reason: str) -> DeviceFacts:
    return DeviceFacts(
        tensorrt=tensorrt,
        compute_capability=gpu.compute_capability if gpu else "",
        gpu=gpu.name if gpu else "",
        multiprocessors=gpu.multiprocessors if gpu else 0,
        l4t=l4t_release(),
        dla_cores=dla_cores,
        reason=reason,
    )


class _Events:
    """Writes events, one per line, from any thread; progress events are thinned out."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._writing = threading.Lock()
        self._progress_at = -_BETWEEN_S

    def send(self, event: Event) -> None:
        with self._writing:
            if isinstance(event, Progressed):
                now = time.monotonic()
                if now - self._progress_at < _BETWEEN_S:
                    return
                self._progress_at = now
            self._file.write(msgspec.json.encode(event) + b"\n")


def _die_with_parent(lifeline: int) -> None:
    """Let the kernel kill this process and its children when the parent's end closes.

    The kill works whatever code runs here, even where no Python thread gets the GIL.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _give_way(memory_bytes: int) -> None:
    # The kernel derives the I/O priority from the niceness.
    os.nice(_LAST)
    Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_bytes:
        # Not RLIMIT_AS: CUDA reserves far more addresses than the board has memory. No limit counts
        # the GPU driver's allocations; for those the parent watches the available memory.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main(sys.argv[1:])
