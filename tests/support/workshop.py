"""A simulated TensorRT on a simulated GPU, and plans for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import find_backend
from edge_server.backends.contract import ExecuteRequest, LoadContext
from edge_server.backends.tensorrt.plan_options import SideCar, encode, sha256_of, side_car_path
from edge_server.gpu.device import Devices
from edge_server.inference.registry import Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.model_config.completion import complete
from edge_server.model_config.config import Completion, ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor
from support.adding_models import network

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest
    from numpy.typing import NDArray

    from edge_server.backends.contract import Model
    from edge_server.inference.registry import LoadedModel
    from edge_server.requests import ResponseCallback
    from support.simulated_gpu import SimulatedGpu

SETTINGS = "EDGE_SIMULATED_TENSORRT"
CONFIG = 'name: "m" platform: "tensorrt_plan" '


def onnx_bytes(
    nodes: list[Any], inputs: Mapping[str, Any], outputs: Mapping[str, Any], **weights: Any
) -> bytes:
    """An ONNX file of `nodes`; inputs and outputs: name → (type, shape)."""
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(name, *said) for name, said in inputs.items()],
        [helper.make_tensor_value_info(name, *said) for name, said in outputs.items()],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return model.SerializeToString()


def add_one(shape: tuple[object, ...] = (1, 4)) -> bytes:
    return network(1, shape)


def two_inputs() -> bytes:
    """y = a + b, whose second dimensions may be given so that they do not go together."""
    return onnx_bytes(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        {"a": (TensorProto.FLOAT, (2, "n")), "b": (TensorProto.FLOAT, (2, "m"))},
        {"y": (TensorProto.FLOAT, (2, "k"))},
    )


class Workshop:
    """One model `m` in a folder: its plan, its configuration, what is loaded of it.

    Attributes:
        gpu: the simulated driver.
        trt: the simulated TensorRT's settings.
    """

    def __init__(
        self, folder: Path, gpu: SimulatedGpu, trt: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.files = ModelFiles("m", folder / "m", {1: folder / "m" / "1"})
        self.gpu = gpu
        self.trt = trt
        self._monkeypatch = monkeypatch
        self.devices = Devices()
        self._loaded: list[Any] = []
        self.plan = self.files.versions[1] / "model.plan"
        self.plan.parent.mkdir(parents=True)

    def tensorrt(self, words: str) -> None:
        """See simulated_settings.py; processes that are started hear it too."""
        said = ",".join(filter(None, [os.environ.get(SETTINGS, ""), words]))
        self._monkeypatch.setenv(SETTINGS, said)
        self.trt.set(words)

    def write(self, onnx_file: bytes | None = None, *, side_car: bool = True, **said: Any) -> None:
        """The plan that the simulated TensorRT would have built, here or as is `said`.

        Args:
            side_car: it lies beside, as `edge-server plan build` writes it.
        """
        from tensorrt.simulated_plan import SimulatedPlan

        from edge_server.backends.tensorrt.engine import Engine, facts_of

        plan = SimulatedPlan(**{"version": self.trt.version, **said})
        self.plan.write_bytes(plan.file(add_one() if onnx_file is None else onnx_file))
        if side_car:
            device = self.devices.gpu(0)
            engine = Engine(device, self.plan, 0 if plan.dla else None, "m")
            written = SideCar(
                onnx_sha256="",
                plan_sha256=sha256_of(self.plan),
                options="",
                built_with=facts_of(device),
                precision="fp32",
                dla_core=engine.dla_core,
                profiles=engine.io.profiles,
                tensors=engine.io.tensors,
            )
            engine.close()
            side_car_path(self.plan).write_bytes(encode(written))

    def config(self, text: str = "", *, auto: bool = True) -> ModelConfig:
        """As a draft has it: completed but for what the plan says."""
        completion = Completion(auto, gpus=self.devices.count, no_gpu=self.devices.reason)
        message = text_format.Parse(CONFIG + text, pb.ModelConfig())
        complete(message, self.files, completion)
        return ModelConfig.of(message, completion)

    def complete(self, text: str = "", *, auto: bool = True) -> ModelConfig:
        return find_backend("tensorrt").complete(self.files, 1, self.config(text, auto=auto))

    def model(self, config: ModelConfig) -> Model:
        """Closed when the test ends."""
        model = find_backend("tensorrt").load(
            LoadContext(self.files.versions[1], config, self.devices)
        )
        self._loaded.append(model)
        return model

    def instance(self, text: str = "", *, at: int = 0) -> Any:
        """One `TensorRtInstance`, at one of the places that the configuration names."""
        config = self.complete(text)
        placements = [p for group in config.instance_groups for p in group.placements]
        instance = self.model(config).make_instance(f"m_{at}", placements[at])
        self._loaded.append(instance)
        return instance

    def loaded(self, text: str = "") -> LoadedModel:
        """The model with its instances, as the server has it."""
        config = self.complete(text)
        model = find_backend("tensorrt").load(
            LoadContext(self.files.versions[1], config, self.devices)
        )
        loaded = Scheduling().model(config, 1, model, self.files.directory)
        self._loaded.append(loaded)
        return loaded

    def forget(self) -> None:
        """The device is lost: nothing on it can be closed, the process would end now."""
        self._loaded.clear()
        self.devices.close()
        self.gpu.reset()

    def start_over(self) -> None:
        """As a new process: what was found out of the GPUs is forgotten."""
        self.devices.close()
        self.devices = Devices()

    def unload(self) -> None:
        while self._loaded:
            self._loaded.pop().close()

    def close(self) -> None:
        self.unload()
        self.devices.close()


class Asked:
    """One request to an instance, and what came of it."""

    def __init__(
        self,
        inputs: Mapping[str, Any],
        outputs: tuple[str, ...] = ("y",),
        *,
        on_device: bool = False,
    ) -> None:
        self.answer: Any = None
        self.copied: list[tuple[str, int]] = []
        tensors = {
            name: value if isinstance(value, Tensor) else Tensor(value)
            for name, value in inputs.items()
        }
        self.request = ExecuteRequest(
            tensors,
            frozenset(outputs),
            self._respond,
            InferRequest("m", tensors, on_device=on_device),
            Snapshot({}),
            lambda direction, n_bytes: self.copied.append((direction, n_bytes)),
        )

    def _respond(self, answer: Any, final: bool, parameters: Any = None) -> None:
        assert final
        assert self.answer is None
        self.answer = answer

    def array(self, name: str = "y") -> NDArray[Any]:
        """An output, on the host."""
        assert isinstance(self.answer, dict), self.answer
        tensor = self.answer[name]
        return tensor.array if tensor.on_device is None else tensor.on_device.on_host()


def infer(loaded: LoadedModel, request: InferRequest) -> ResponseCallback:
    """Through the model's scheduler, which answers before it returns."""
    answers: list[ResponseCallback] = []
    loaded.scheduler.submit(request, Snapshot({}), lambda answer, final: answers.append(answer))
    (answer,) = answers
    return answer
