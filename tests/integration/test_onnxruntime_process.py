"""Files and parameters: what is wrong with them is told, what is right is run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SESSION = """
import sys
from edge_server.backends.onnxruntime import ort
ort.InferenceSession(sys.argv[1])
"""


def test_nobody_is_told_what_it_is_used_for(
    tmp_path: Path, write_onnx: Callable[..., None]
) -> None:
    path = tmp_path / "model.onnx"
    write_onnx(path, (3,))
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "ORT_"))}
    subprocess.run(
        [sys.executable, "-c", SESSION, str(path)],
        env={**environment, "HOME": str(home)},
        check=True,
    )
    # What is to be sent later would be kept there till then.
    assert not list(home.rglob("*onnxruntime*"))
