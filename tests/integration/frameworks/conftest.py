"""A daemon with models that a framework has made, in the Python that has the framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnxruntime
import pytest
from integration.frameworks.daemon import (
    MODULES,
    Served,
    params,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=params(*MODULES))
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    made = Served(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture(scope="module")
def onnx_says(served: Served) -> Any:
    """What ONNX Runtime makes of an input of `net` or `lane`."""
    folder = served.repository.parent
    sessions = {
        name: onnxruntime.InferenceSession(
            folder / f"{name}.onnx", providers=["CPUExecutionProvider"]
        )
        for name in ("net", "lane")
    }
    return lambda name, x: sessions[name].run(["y"], {"x": x})[0]
