"""`image_preprocess` models for tests, served as ever, on the CPU or on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import LoadContext
from edge_server.backends.vision import image_preprocess
from edge_server.backends.vision.preprocess_cpu import scale_frame
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.pixels import Image
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.gpu.device import Devices
    from edge_server.gpu.memory import CudaArray
    from edge_server.requests import Parameter

FILES = ModelFiles("p", Path("p"), {1: Path("p/1")})
IMAGE = 'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 3] }'
NETWORK = 'output { name: "input" data_type: TYPE_FP32 dims: [3, 36, 64] }'
HALVES = 'output { name: "input" data_type: TYPE_FP16 dims: [3, 36, 64] }'
SIZE = 'output { name: "size" data_type: TYPE_INT32 dims: [2] }'
CPU = 'instance_group { name: "p" kind: KIND_CPU count: 1 }'
GPU = 'instance_group { name: "p" kind: KIND_GPU gpus: 0 count: 1 }'
PLACES = pytest.mark.parametrize("group", [CPU, GPU], ids=["CPU", "GPU"])


def config(text: str = IMAGE + NETWORK + SIZE + CPU, batch: int = 1) -> ModelConfig:
    head = f'name: "p" backend: "image_preprocess" max_batch_size: {batch} '
    message = text_format.Parse(head + text, pb.ModelConfig())
    return image_preprocess.complete(FILES, 1, ModelConfig.of(message))


def parameter(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def entry(model_config: ModelConfig, devices: Devices) -> ModelEntry:
    """The model, READY."""
    model = image_preprocess.load(LoadContext(Path("p/1"), model_config, devices))
    loaded = Scheduling().model(model_config, 1, model)
    return ModelEntry("p", 1, ModelState.READY, loaded=loaded)


class Preprocess:
    """A model alone in its world."""

    def __init__(self, model_config: ModelConfig, devices: Devices) -> None:
        self.entry = entry(model_config, devices)
        self.snapshot = Snapshot({("p", 1): self.entry})

    def run(
        self, image: NDArray[np.uint8] | CudaArray, *outputs: str, **parameters: Parameter
    ) -> dict[str, NDArray[np.generic]]:
        """All answers, on the host."""
        request = InferRequest(
            "p", {"image": Tensor(image)}, outputs=outputs, parameters=parameters
        )
        answer = self.snapshot.infer(request)
        return {name: tensor.array for name, tensor in answer.outputs.items()}

    def stay(self, image: NDArray[np.uint8] | CudaArray) -> CudaArray:
        """The planes, where the model made them."""
        request = InferRequest("p", {"image": Tensor(image)}, outputs=("input",), on_device=True)
        array = self.snapshot.infer(request).outputs["input"].on_device
        assert array is not None
        return array

    def copies(self) -> dict[str, tuple[int, int]]:
        return copies(self.entry)

    def close(self) -> None:
        assert self.entry.loaded is not None
        self.entry.loaded.close()


def copies(of: ModelEntry) -> dict[str, tuple[int, int]]:
    """Direction → how many copies, and how many bytes; without those that there were none of."""
    assert of.loaded is not None
    counted = of.loaded.statistics.counts().copies.items()
    return {str(way): (each.count, each.n_bytes) for way, each in counted if each.count}


def frames(count: int, height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def by_opencv(
    images: Sequence[NDArray[np.uint8]], dtype: type[np.floating] = np.float32
) -> NDArray[np.floating]:
    """(frames, 3, 36, 64), as the CPU path defines it."""
    made = np.empty((len(images), 3, 36, 64), dtype)
    for image, out in zip(images, made, strict=True):
        scale_frame(Image.of_bgr(image), np.float32(1 / 255), out)
    return made
