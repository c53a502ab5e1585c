"""Free GPU memory and pinned memory on a separate thread."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from edge_server.gpu.device import Device

# The time limit of `close` for the last frees: the GPU may be stuck.
_CLOSING_S = 5.0


class Freeing:
    """Frees memory on its own thread, so that the thread that drops the memory never waits.

    The driver frees only once the GPU is idle. Freed on a request's thread, the memory would block
    that thread and, as pycuda holds the GIL meanwhile, every other thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # The only queue with a reentrant put: the garbage collector runs finalizers in the middle
        # of any call, even of a put.
        self._jobs: queue.SimpleQueue[tuple[str, object] | threading.Event | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"free {device}", daemon=True)
        self._thread.start()

    def free(self, function: str, pointer: object) -> None:
        """Queue a call of the driver's `function` with `pointer`; return at once."""
        self._jobs.put((function, pointer))

    def wait(self) -> None:
        """Return when all memory queued before is free, or the thread has ended."""
        reached = threading.Event()
        self._jobs.put(reached)
        while not reached.wait(1.0) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Free all queued memory; memory dropped later is freed with the context."""
        self._jobs.put(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            function, pointer = job
            # The memory of a lost device cannot be freed, and need not be.
            with suppress(EdgeServerError):
                self._device.call("free memory", function, pointer)
