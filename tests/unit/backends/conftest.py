"""GPUs for backends, simulated; their kernels run on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.gpu.device import Devices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu


@pytest.fixture
def devices(
    simulated_gpu: SimulatedGpu, kernels_on_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Devices]:
    monkeypatch.setenv("EDGE_SIMULATED_KERNELS", str(kernels_on_cpu))
    devices = Devices()
    yield devices
    devices.close()
