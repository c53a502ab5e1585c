"""A daemon with models that a framework has made, in the Python that has the framework."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from integration.frameworks import networks
from onnx import TensorProto, helper, numpy_helper
from support.daemon_process import Process
from support.waiting import wait_until

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
MODULES = {
    "openvino": "openvino",
    "pytorch": "torch",
    "tensorflow": "tensorflow",
    "paddle": "paddle",
}
# TensorFlow is imported in 20 s on a busy machine.
LOAD_S = 240.0


def interpreter(backend: str) -> str:
    """The Python that has the framework: its own environment, or this one."""
    own = ROOT / f".venv-{backend}" / "bin" / "python"
    if own.exists():
        return str(own)
    if importlib.util.find_spec(MODULES[backend]) is None:
        pytest.skip(f"no {backend} here: scripts/test --all makes .venv-{backend} for it")
    return sys.executable


class Served:
    """A daemon that loads models on request, and what its clients ask."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend = backend
        self.python = interpreter(backend)
        self.repository = folder / "models"
        write_onnx(folder)
        self.make(backend)
        if backend == "paddle":
            self.make(backend, "old")
        settings = folder / "edge-server.toml"
        other = f'{backend} = "{self.python}"' if self.python != sys.executable else ""
        settings.write_text(f"[python]\ninterpreters = {{ {other} }}\n")
        repositories = [self.repository, *folder.glob("tutorial_*")]
        self.process = Process(
            folder,
            f"--config={settings}",
            "--model-control-mode=explicit",
            *(f"--model-repository={each}" for each in repositories),
        )
        self.process.wait_for("READY=1")
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self.process.port}")

    def make(self, backend: str, *arguments: str) -> None:
        ran = subprocess.run(
            [self.python, f"make_{backend}.py", str(self.repository), *arguments],
            cwd=HERE,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
                "FLAGS_enable_pir_api": "0" if "old" in arguments else "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr

    def load(self, model: str) -> Any:
        """Load the model; its configuration."""
        self.client.load_model(model, client_timeout=LOAD_S)
        return self.client.get_model_config(model).config

    def infer(self, model: str, **inputs: np.ndarray) -> Any:
        given = []
        for name, array in inputs.items():
            datatype = (
                "BYTES" if array.dtype == np.object_ else triton.np_to_triton_dtype(array.dtype)
            )
            given.append(triton.InferInput(name, array.shape, datatype))
            given[-1].set_data_from_numpy(array)
        return self.client.infer(model, given, client_timeout=60)

    def only(self, model: str, x: np.ndarray) -> np.ndarray:
        """The one output for the one input, by their names in the configuration."""
        config = self.client.get_model_config(model).config
        (given,), (made,) = config.input, config.output
        return self.infer(model, **{given.name: x}).as_numpy(made.name)

    def children(self, instance: str) -> list[int]:
        """The processes of a model's instances, by the beginning of their names."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            parent = f"PPid:\t{self.process.popen.pid}\n"
            if any(w.decode(errors="replace").startswith(instance) for w in words[1:]):
                try:
                    ours = parent in (path.parent / "status").read_text()
                except OSError:
                    continue
                found += [int(path.parent.name)] * ours
        return found

    def wait_for_children(self, instance: str, count: int) -> list[int]:
        wait_until(
            lambda: len(self.children(instance)) == count,
            LOAD_S,
            otherwise=self.process.log.read_text,
        )
        return self.children(instance)

    def close(self) -> None:
        self.client.close()
        self.process.close()


def write_onnx(folder: Path) -> None:
    for name, weights, network in (
        ("net", networks.net_weights(), net_graph),
        ("lane", networks.lane_weights(), lane_graph),
    ):
        named = [numpy_helper.from_array(w, f"w{index}") for index, w in enumerate(weights)]
        graph = network(named)
        opset = [helper.make_opsetid("", 17)]
        onnx.save(
            helper.make_model(graph, opset_imports=opset, ir_version=8), folder / f"{name}.onnx"
        )


def net_graph(weights: list[Any]) -> Any:
    nodes = [
        helper.make_node("Conv", ["x", "w0", "w1"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    return graph_of(nodes, ["n", 3, "h", "w"], ["n", 4, "h", "w"], weights)


def lane_graph(weights: list[Any]) -> Any:
    rows, columns = networks.LANE_ROWS, networks.LANE_COLUMNS
    weights = [*weights, numpy_helper.from_array(np.array([-1, rows, columns]), "shape")]
    nodes, before = [], "x"
    for at in (0, 2, 4):
        names = [before, f"w{at}", f"w{at + 1}"]
        nodes.append(helper.make_node("Conv", names, [f"c{at}"], pads=[1] * 4, strides=[2, 2]))
        nodes.append(helper.make_node("Relu", [f"c{at}"], [f"r{at}"]))
        before = f"r{at}"
    nodes += [
        helper.make_node("ReduceMean", [before], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("Gemm", ["m", "w6", "w7"], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]),
        helper.make_node("Gemm", ["h", "w8", "w9"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["y"]),
    ]
    return graph_of(nodes, ["n", *networks.LANE_SHAPE], ["n", rows, columns], weights)


def graph_of(nodes: list[Any], x: list[Any], y: list[Any], weights: list[Any]) -> Any:
    tensors = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x), ("y", y))
    )
    given, made = tensors
    return helper.make_graph(nodes, "g", [given], [made], weights)


def params(*backends: str) -> list[Any]:
    """The frameworks as parameters; those whose environments are large are for the long tests."""
    return [
        pytest.param(each, marks=() if each == "openvino" else pytest.mark.long)
        for each in backends
    ]
