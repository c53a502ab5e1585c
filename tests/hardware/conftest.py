"""A real GPU; without one every test here is skipped, with the reason.

    python -m pytest -m hardware tests/hardware

Only numpy, OpenCV, msgspec, tritonclient, pytest and pytest-timeout are needed beside the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.gpu.device import Devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.gpu.device import Device


@pytest.fixture(scope="session")
def devices() -> Iterator[Devices]:
    devices = Devices()
    if not devices.count:
        pytest.skip(devices.reason)
    yield devices
    devices.close()


@pytest.fixture(scope="session")
def device(devices: Devices) -> Device:
    return devices.gpu()
