"""A simulated GPU with a simulated TensorRT, and plans for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.build_lock import own_build_lock  # noqa: F401 - a fixture
from support.simulated_gpu import SIMULATED_GPU
from support.workshop import (
    Asked,
    Workshop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu

    from edge_server.backends.contract import Instance


@pytest.fixture
def workshop(
    tmp_path: Path, simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workshop]:
    monkeypatch.syspath_prepend(SIMULATED_GPU)
    # For the process that describes a plan.
    for name, value in simulated_gpu.environment().items():
        monkeypatch.setenv(name, value)
    from tensorrt.simulated_settings import settings

    settings.reset()
    workshop = Workshop(tmp_path, simulated_gpu, settings, monkeypatch)
    yield workshop
    workshop.close()
    settings.reset()


@pytest.fixture
def ask() -> Callable[..., Asked]:
    """Runs one request on an instance."""

    def run(instance: Instance, **arguments: Any) -> Asked:
        asked = Asked(**arguments)
        instance.execute([asked.request])
        return asked

    return run
