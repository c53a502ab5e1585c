"""The GPUs of this process, each opened at its first use."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from edge_server.errors import DeviceLost, Unavailable
from edge_server.gpu.device import load_driver, open_device
from edge_server.gpu.libcuda import Libcuda

if TYPE_CHECKING:
    from edge_server.gpu.device import Device


class Devices:
    """Opens GPUs, and records the loss of a GPU.

    Construction calls no driver; on a machine without one, the first `gpu` raises the reason.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Device] = {}
        self._lost: DeviceLost | None = None

    @property
    def count(self) -> int:
        """Return the number of GPUs; the driver is queried once."""
        return self._counted[0]

    @property
    def reason(self) -> str:
        """Return why this machine has no usable GPU, with the remedy; empty when it has one."""
        return self._counted[1]

    def gpu(self, index: int = 0) -> Device:
        """Return GPU `index`, in CUDA's order of the GPUs visible to this process.

        Raises:
            Unavailable: the GPU is missing or unusable; the text names the remedy.
        """
        with self._lock:
            device = self._open.get(index)
            if device is None:
                device = self._open[index] = open_device(index, on_lost=self._lose)
            return device

    def check(self) -> None:
        """Return if every open GPU works.

        Raises:
            DeviceLost: a GPU is lost, on whichever thread; only a new process can recover.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Close all GPUs; no object made on them may be used afterwards."""
        with self._lock:
            for device in self._open.values():
                device.close()
            self._open.clear()

    def _lose(self, error: DeviceLost) -> None:
        # The first error names the cause.
        self._lost = self._lost or error

    @cached_property
    def _counted(self) -> tuple[int, str]:
        try:
            return load_driver(Libcuda()).Device.count(), ""
        except Unavailable as error:
            return 0, str(error)
