"""A device on the simulated driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.gpu.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def device(simulated_gpu: object) -> Iterator[Device]:
    device = Device()
    yield device
    device.close()
