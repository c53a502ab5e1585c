"""A device on the simulated driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.gpu.device import open_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.gpu.device import Device


@pytest.fixture
def device(simulated_gpu: object) -> Iterator[Device]:
    device = open_device(0)
    yield device
    device.close()
