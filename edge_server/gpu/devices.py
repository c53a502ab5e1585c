"""The GPUs of this process: each opened once, when it is first asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_server.errors import DeviceLost, Unavailable
from edge_server.gpu.device import load_driver, open_device
from edge_server.gpu.libcuda import Libcuda

if TYPE_CHECKING:
    from edge_server.gpu.device import Device


class Devices:
    """Hands out GPUs, and remembers when one is lost.

    Construction touches no driver; where there is none, the first `gpu` raises why.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Device] = {}
        self._counted: tuple[int, str] | None = None
        self._lost: DeviceLost | None = None

    @property
    def count(self) -> int:
        """How many there are; asked of the driver once."""
        return self._count()[0]

    @property
    def reason(self) -> str:
        """Why there is none, with the remedy; empty where there is one."""
        return self._count()[1]

    def gpu(self, index: int = 0) -> Device:
        """The GPU `index`, as CUDA counts the GPUs that this process sees.

        Raises:
            Unavailable: it is not here or cannot be used; with the remedy.
        """
        with self._lock:
            device = self._open.get(index)
            if device is None:
                device = self._open[index] = open_device(index, on_lost=self._lose)
            return device

    def check(self) -> None:
        """Return while every GPU works.

        Raises:
            DeviceLost: one is lost, whichever thread met that; only a new process helps.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Give all of them back; nothing of theirs may be used afterwards."""
        with self._lock:
            for device in self._open.values():
                device.close()
            self._open.clear()

    def _lose(self, error: DeviceLost) -> None:
        # The first error names the cause.
        self._lost = self._lost or error

    def _count(self) -> tuple[int, str]:
        with self._lock:
            if self._counted is None:
                try:
                    self._counted = (load_driver(Libcuda()).Device.count(), "")
                except Unavailable as error:
                    self._counted = (0, str(error))
            return self._counted
