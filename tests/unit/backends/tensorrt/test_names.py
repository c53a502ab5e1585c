"""A name that some TensorRT lacks would be seen in the backend; see tests/unit/plans, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tensorrt_api import real_bindings, walk

SOURCES = Path(__file__).parents[4] / "edge_server" / "backends" / "tensorrt"
NAMES: dict[str, Any] = real_bindings.names()
PLANTED = {
    "what only 10 has, its guard taken away": (
        "engine.py",
        'if not hasattr(engine, "get_tensor_profile_values"):',
        "if not tensor.is_input:",
        "trt.ICudaEngine.get_tensor_profile_values is not in TensorRT 8.6,",
    ),
    "the way to run by numbers of bindings, which 10 has dropped": (
        "io_buffers.py",
        "execute_async_v3(handle)",
        "execute_async_v2([], self._stream.handle)",
        "execute_async_v2 is not in TensorRT 10.3, 10.7, 10.13, 10.16, 11.4",
    ),
    "a context without memory, which 11 has dropped": (
        "engine.py",
        "engine.create_execution_context()",
        "engine.create_execution_context_without_device_memory()",
        "create_execution_context_without_device_memory is not in TensorRT 11.4",
    ),
    "a strategy that 8 does not know": (
        "engine.py",
        "engine.create_execution_context()",
        "engine.create_execution_context(trt.ExecutionContextAllocationStrategy.STATIC)",
        "trt.ExecutionContextAllocationStrategy is not in TensorRT 8.6",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    name, right, wrong, said = PLANTED[mistake]
    source = (SOURCES / name).read_text()
    assert right in source
    found = walk.lacking(source.replace(right, wrong), NAMES, name)
    assert any(said in line for line in found), found


def test_the_backend_is_walked_as_a_whole() -> None:
    """If nothing of it were understood, nothing would be found missing."""
    nothing = {version: {"": {}} for version in NAMES}
    text = (SOURCES / "engine.py").read_text()
    assert sum("trt." in line for line in walk.lacking(text, nothing)) > 5
