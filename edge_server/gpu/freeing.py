"""Memory that the GPU reaches, freed by a thread of its own."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from edge_server.gpu.device import Device

# How long `close` waits for the last frees: the GPU may be stuck.
_CLOSING_S = 5.0


class Freeing:
    """Frees memory on its own thread, after the thread that drops it has gone on.

    The driver frees only once the GPU is idle. A request's thread would wait for that, and in
    pycuda, which keeps the interpreter's lock meanwhile, every other thread with it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # The only queue with a reentrant put: the collector runs finalizers in the middle of
        # any call, also of a put.
        self._jobs: queue.SimpleQueue[tuple[str, object] | threading.Event | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"free {device}", daemon=True)
        self._thread.start()

    def free(self, function: str, pointer: object) -> None:
        """Call the driver's `function` with `pointer`, some time soon."""
        self._jobs.put((function, pointer))

    def wait(self) -> None:
        """Return when all memory given before is free, or the thread has ended."""
        reached = threading.Event()
        self._jobs.put(reached)
        while not reached.wait(1.0) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Free the memory given so far; memory dropped later is freed with the context."""
        self._jobs.put(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            function, pointer = job
            # Memory of a lost device cannot be freed, and need not.
            with suppress(EdgeServerError):
                self._device.call("free memory", function, pointer)
