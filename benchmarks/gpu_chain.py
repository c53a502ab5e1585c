"""A frame goes through the shipped ensemble on a GPU: which copies are made, and how long it takes.

    python benchmarks/gpu_chain.py [--quick] [--json FILE]

Preprocessing is the shipped model's, on the GPU; decoding is, on the CPU; between them runs in turn
each network that is possible here: a plain copy on the device (which shows the hand-over and
nothing else), one of torch's with random weights, and the shipped one in ONNX Runtime on CUDA. The
same network fed from the host gives the lanes to compare with. Exits 69 where there is no GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_section import run_section
from gpu_timing import host_ms

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.source import open_source
from edge_server.errors import Unavailable
from edge_server.gpu.memory import BufferPool, CudaArray
from edge_server.gpu.stream import Stream
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.lifecycle.build import Build
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion, InstanceGroup
from edge_server.model_config.ensemble_graph import resolve_graph
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.gpu.device import Device, Devices
    from edge_server.model_config.config import Placement

MODELS = Path(__file__).parent.parent / "models"
PREPROCESS, NETWORK, DECODE = "lane_preprocess", "laneDetect_model", "lane_decode"
ENSEMBLE = "lane_detection"
ROWS, COLUMNS = 2784, 77
# Of lanes in px, between one way and the other.
MOST_DIFFERENCE_PX = 1.0


def main() -> int:
    return run_section("gpu_chain", __doc__, report)


def report(devices: Devices, quick: bool) -> Iterator[dict[str, Any]]:
    device = devices.gpu()
    source = open_source("synthetic://road?seed=7&fps=0")
    frame = Tensor(bgr_of(source.read().image)[np.newaxis])
    source.close()
    rows, notes = [], []
    for make in (Copying, TorchNetwork, OnnxNetwork):
        try:
            rows.append(measure(devices, make(device), frame, repeats=2 if quick else 50))
        except Unavailable as error:
            notes.append(str(error))
            print(error)
        yield {"rows": rows, "goals": goals_of(rows), "notes": notes}


def measure(devices: Devices, network: Network, frame: Tensor, repeats: int) -> dict[str, Any]:
    """Figures for one network, with the preprocessing before it on the GPU and on the CPU."""
    lanes, took_ms, copies = {}, {}, {}
    for where, gpus in (("gpu", devices.count), ("cpu", 0)):
        snapshot = world(devices, network, gpus)
        request = InferRequest(ENSEMBLE, {"image": frame})
        took_ms[where] = host_ms(lambda s=snapshot, r=request: s.infer(r), repeats)
        lanes[where] = snapshot.infer(request).outputs["lane_points"].array
        copies[where] = {
            f"{name} {way}": counted.count / (repeats + 2)
            for name in (PREPROCESS, NETWORK, DECODE)
            for way, counted in snapshot.find(name, "").statistics.counts().copies.items()
            if counted.count
        }
        snapshot.entries[NETWORK, 1].loaded.close()
    same = lanes["gpu"].shape == lanes["cpu"].shape
    difference = float(np.abs(lanes["gpu"] - lanes["cpu"]).max(initial=0)) if same else None
    print(
        f"{network.name}: {took_ms['gpu']:.2f} ms a frame with copies {copies['gpu']}; "
        f"{took_ms['cpu']:.2f} ms where the CPU preprocesses, with copies {copies['cpu']}; "
        f"lanes differ by {difference} px"
    )
    return {
        "network": network.name,
        "copies_per_frame": copies["gpu"],
        "copies_per_frame_cpu_preprocess": copies["cpu"],
        "frame_ms": took_ms["gpu"],
        "frame_ms_cpu_preprocess": took_ms["cpu"],
        "lanes": int(lanes["gpu"].shape[1]),
        "largest_difference_px": difference,
    }


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for row in rows:
        between = dict(row["copies_per_frame"])
        # The decoding works on the host.
        between.pop(f"{NETWORK} to_host", None)
        # A card is given the frame itself, once; an integrated GPU reads it in place.
        between.pop(f"{PREPROCESS} to_device", None)
        difference = row["largest_difference_px"]
        for goal, reached, met in (
            ("no copy between preprocessing and network", sum(between.values()), not between),
            (
                f"lanes within {MOST_DIFFERENCE_PX:g} px of those by the host",
                "other lanes" if difference is None else difference,
                difference is not None and difference <= MOST_DIFFERENCE_PX,
            ),
        ):
            goals.append({"goal": f"{row['network']}: {goal}", "reached": reached, "met": met})
    return goals


def world(devices: Devices, network: Network, gpus: int) -> Snapshot:
    """The shipped models, with `network` in the place of theirs."""
    registry = ModelRegistry()
    completion = Completion(gpus=gpus, no_gpu="it is not asked for")
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry), Build(devices=devices)),
        Repositories([MODELS]),
        completion=completion,
    )
    for failed in loader.load_all():
        raise Unavailable(failed.reason)
    entries = dict(registry.snapshot.entries)
    on_gpu = InstanceGroup(NETWORK, "GPU", 1, gpus=(0,))
    config = replace(entries[NETWORK, 1].loaded.config, instance_groups=(on_gpu,))
    loaded = Scheduling().model(config, 1, network)
    entries[NETWORK, 1] = ModelEntry(NETWORK, 1, ModelState.READY, loaded=loaded)
    ensemble = resolve_graph(
        entries[ENSEMBLE, 1].loaded.config,
        MODELS / ENSEMBLE,
        lambda step: entries[step.model_name, 1].loaded.config,
    )
    loaded = Scheduling().ensemble(ensemble, 1)
    entries[ENSEMBLE, 1] = ModelEntry(ENSEMBLE, 1, ModelState.READY, loaded=loaded)
    return Snapshot(entries)


class Network:
    """A model whose instances work on the device, on a stream of their own; at once also one of
    its instances, as here one frame runs at a time."""

    name = ""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Stream = Stream(device)
        self.pool = BufferPool(device, 64 << 20, self.name)

    def run(self, planes: CudaArray) -> CudaArray:
        """(1, ROWS, COLUMNS), given to `stream`, which waits for `planes` already."""
        raise NotImplementedError

    def make_instance(self, name: str, placement: Placement) -> Network:
        del name, placement
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            tensor = request.inputs["input"]
            planes = tensor.on_device
            if planes is None:
                request.copied("to_device", tensor.array.nbytes)
                planes = self.pool.take(self.stream, tensor.shape, tensor.array.dtype)
                self.stream.to_device(planes, tensor.array)
                planes.written(self.stream)
            assert isinstance(planes, CudaArray)
            self.stream.wait(planes.ready)
            made = self.run(planes)
            planes.read_by(self.stream.record())
            request.respond({"predict_lanes": Tensor(made)}, True)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


class Copying(Network):
    """Takes the front of its input for its answer."""

    name = "a copy on the device"

    def run(self, planes: CudaArray) -> CudaArray:
        made = self.pool.take(self.stream, (1, ROWS, COLUMNS), np.float32)
        self.stream.copy(made, planes.reshape(-1)[: ROWS * COLUMNS])
        made.written(self.stream)
        return made


class TorchView:
    """An array as torch takes it, without a copy; the streams are the caller's to order."""

    def __init__(self, array: CudaArray) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.pointer, False),
            "strides": None,
            "version": 2,
        }


class TorchNetwork(Network):
    """Convolutions with random weights, the same ones each time."""

    def __init__(self, device: Device) -> None:
        try:
            import torch  # noqa: PLC0415 - where it is
        except ImportError:
            raise Unavailable("torch is not here: no network of torch's") from None
        if not torch.cuda.is_available():
            raise Unavailable(f"torch {torch.__version__} finds no GPU: no network of torch's")
        self.name = f"torch {torch.__version__}, convolutions"
        super().__init__(device)
        self._torch = torch
        self._torch_stream = torch.cuda.ExternalStream(self.stream.handle)
        torch.manual_seed(0)
        nn = torch.nn
        layers = [nn.Conv2d(3, 32, 5, 4, 2), nn.ReLU(), nn.Conv2d(32, COLUMNS, 3, 2, 1)]
        self._layers = nn.Sequential(*layers).cuda().eval()
        torch.cuda.synchronize()

    def run(self, planes: CudaArray) -> CudaArray:
        with self._torch.cuda.stream(self._torch_stream), self._torch.no_grad():
            made = self._layers(self._torch.as_tensor(TorchView(planes), device="cuda"))
            out = self.pool.take(self.stream, (1, ROWS, COLUMNS), np.float32)
            rows = made.flatten(2)[:, :, :ROWS].transpose(1, 2)
            self._torch.as_tensor(TorchView(out), device="cuda").copy_(rows)
        out.written(self.stream)
        return out


class OnnxNetwork(Network):
    """The shipped network, in ONNX Runtime on the GPU."""

    def __init__(self, device: Device) -> None:
        try:
            import onnxruntime  # noqa: PLC0415 - where it is
        except ImportError:
            raise Unavailable("onnxruntime is not here: no network of its") from None
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise Unavailable(
                f"onnxruntime {onnxruntime.__version__} has no CUDA: no network of its"
            )
        self.name = f"onnxruntime {onnxruntime.__version__}, the shipped network"
        super().__init__(device)
        cuda = {"device_id": device.index, "user_compute_stream": str(self.stream.handle)}
        self._session = onnxruntime.InferenceSession(
            MODELS / NETWORK / "1" / "model.onnx", providers=[("CUDAExecutionProvider", cuda)]
        )

    def run(self, planes: CudaArray) -> CudaArray:
        made = self.pool.take(self.stream, (1, ROWS, COLUMNS), np.float32)
        binding = self._session.io_binding()
        place = ("cuda", self.device.index, np.float32)
        binding.bind_input("input", *place, planes.shape, planes.pointer)
        binding.bind_output("predict_lanes", *place, made.shape, made.pointer)
        self._session.run_with_iobinding(binding)
        made.written(self.stream)
        return made


if __name__ == "__main__":
    sys.exit(main())
