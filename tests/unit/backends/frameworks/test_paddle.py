"""Paddle's predictor keeps the inputs of a request for the next one."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from edge_server.backends.frameworks.runner import BadInput, ModelFile
from edge_server.tensors import DataType, TensorSpec


def test_an_input_of_the_last_request_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inference = MagicMock()
    predictor = inference.create_predictor.return_value
    predictor.get_input_names.return_value = ["x", "y"]
    predictor.get_output_names.return_value = ["z"]
    monkeypatch.setitem(sys.modules, "paddle", SimpleNamespace(inference=inference))
    name = "edge_server.backends.frameworks.paddle"
    x, y, z = (TensorSpec(each, DataType.FP32, (2,), each == "y") for each in "xyz")
    file = ModelFile("model.pdmodel", "", (x, y), (z,), 0, {}, {}, 1)
    model = importlib.import_module(name).open_model(file)
    del sys.modules[name]
    array = np.zeros(2, np.float32)
    assert set(model.run({"x": array, "y": array}, frozenset({"z"}))) == {"z"}
    with pytest.raises(BadInput, match="input 'y' was left out"):
        model.run({"x": array}, frozenset({"z"}))
