"""Backends in Python: a directory with a model.py runs every model that names it as its backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.settings import Python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BACKEND = """
import json
import os
import numpy as np
import triton_python_backend_utils as pb_utils
from factors import FACTORS

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for add, name in ((config.add_input, "x"), (config.add_output, "y")):
            add({"name": name, "data_type": "TYPE_INT32", "dims": [-1]})
        return config

    def initialize(self, args):
        directory = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(directory, "factor.json")) as file:
            self.factor = FACTORS[json.load(file)]
        self.backend = json.loads(args["model_config"])["backend"]

    def execute(self, requests):
        assert self.backend == "times"
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(
                "y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy() * self.factor)])
            for r in requests
        ]
"""


def test_a_backend_of_the_backend_directory_runs_its_models(
    serve_with: Callable[..., Any], tmp_path: Path
) -> None:
    """Its files are read in the sandbox, though they lie beside the daemon's own."""
    backends = tmp_path / "backends"
    (backends / "times").mkdir(parents=True)
    (backends / "times" / "model.py").write_text(BACKEND)
    (backends / "times" / "factors.py").write_text("FACTORS = {'two': 2, 'three': 3}\n")
    for name, factor in (("double", "two"), ("triple", "three")):
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "factor.json").write_text(f'"{factor}"')
        config = version.parent / "config.pbtxt"
        config.write_text('backend: "times" instance_group { count: 2 kind: KIND_CPU }')
    served = serve_with(Python(backends=str(backends), private=(str(backends),)))
    assert not served.failed
    assert served.values("double", 4) == [8]
    assert served.values("triple", 4) == [12]
    assert served.entry("double").loaded.config.message.backend == "times"


def test_a_backend_that_is_not_there_is_unknown(
    serve_with: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text('backend: "times"')
    served = serve_with(Python(backends=str(tmp_path)))
    assert "unable to find backend library for backend 'times'" in str(served.failed[0].reason)
