"""A plan runs on its device only, so `plan verify` refuses without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from unit.tools.test_plan_verification import CONFIG, write_scale

from edge_server.errors import Unavailable
from edge_server.tools.plan import find_target, verify

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_device_verify_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "m"
    write_scale(model / "1" / "model.onnx", 10)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "1" / "model.plan").write_bytes(b"plan")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="verify runs the plan, which takes its device: no CUDA"):
        verify(find_target("m", [model.parent]), None, 1)
