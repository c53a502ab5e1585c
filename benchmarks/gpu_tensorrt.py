"""The shipped network as a TensorRT plan: built by our builder, served by our backend, compared.

    python benchmarks/gpu_tensorrt.py [--quick] [--json FILE]

Takes TensorRT where it can be imported, else TensorRT-RTX under its name (tests/rtx_as_tensorrt).
Each plan is loaded as the daemon loads it, asked with tensors on the host and on the GPU, with and
without CUDA graphs, and once more behind the shipped preprocessing; ONNX Runtime on the CPU says
what is right, and on CUDA, where it can, what is quick. A small network with a free batch has two
profiles. Exits 69 where there is no GPU or neither TensorRT.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_chain import DECODE, MODELS, MOST_DIFFERENCE_PX, NETWORK, PREPROCESS, OnnxNetwork
from gpu_section import run_section
from gpu_timing import host_ms
from tiny_onnx import relu_of_product

from edge_server.backends.tensorrt.plan_cache import make_plan
from edge_server.backends.tensorrt.plan_options import build_options_of, version_of
from edge_server.backends.tensorrt.plan_process import build
from edge_server.cameras.colour import bgr_of
from edge_server.cameras.source import open_source
from edge_server.errors import DeviceLost, EdgeServerError, Unavailable
from edge_server.gpu.device import Devices
from edge_server.gpu.memory import BufferPool
from edge_server.gpu.stream import Stream
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.lifecycle.build import Build
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion, ModelConfig
from edge_server.model_config.parse import read_model_config
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor
from edge_server.tools.plan import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from edge_server.gpu.memory import CudaArray

RTX_AS_TENSORRT = Path(__file__).parent.parent / "tests" / "rtx_as_tensorrt"
CHAIN = "lane_detection"
LANES = """
name: "laneDetect_model" platform: "tensorrt_plan" max_batch_size: 1
input { name: "input" data_type: TYPE_FP32 dims: [ 3, 360, 640 ] }
output { name: "predict_lanes" data_type: TYPE_FP32 dims: [ 2784, 77 ] }
instance_group { kind: KIND_GPU gpus: 0 count: 1 }
"""
WIDTH = 256
# The batches that are asked for, by the profile that takes them best.
BATCHES = (1, 3, 8)
FREE = f"""
name: "free" platform: "tensorrt_plan" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
instance_group {{ kind: KIND_GPU gpus: 0 count: 1 profile: [ "0", "1" ] }}
parameters {{ key: "plan_min" value {{ string_value: "x:1x{WIDTH};x:2x{WIDTH}" }} }}
parameters {{ key: "plan_opt" value {{ string_value: "x:1x{WIDTH};x:8x{WIDTH}" }} }}
parameters {{ key: "plan_max" value {{ string_value: "x:1x{WIDTH};x:8x{WIDTH}" }} }}
"""
# With CUDA graphs, or without.
GRAPHS = {
    True: "optimization { cuda { graphs: true } }\n",
    False: 'parameters { key: "cuda_graphs" value { string_value: "false" } }\n',
}


def main() -> int:
    return run_section("gpu_tensorrt", __doc__, report)


def report(devices: Devices, quick: bool) -> Iterator[dict[str, Any]]:
    name, version = find_tensorrt(devices.gpu().compute_capability)
    print(name, flush=True)
    tried = Tried(devices, version, quick=quick)
    with tempfile.TemporaryDirectory(prefix="edge-server-") as folder:
        for _ in tried.everything(Path(folder)):
            yield {"rows": tried.rows, "goals": tried.goals, "notes": [name, *tried.notes]}
    print("\n".join(tried.notes))


def find_tensorrt(capability: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """What is called TensorRT from now on, here and in processes that are started.

    Raises:
        Unavailable: there is none, under either name, or none for a GPU of that capability.
    """
    edition = "TensorRT"
    if importlib.util.find_spec("tensorrt") is None:
        if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
            raise Unavailable(
                "neither TensorRT nor TensorRT-RTX can be imported: on a Jetson apt install "
                "python3-libnvinfer; elsewhere pip install 'edge-server[tensorrt-tests]'"
            )
        edition = "TensorRT-RTX, under the name of TensorRT"
        sys.path.insert(0, str(RTX_AS_TENSORRT))
        paths = [str(RTX_AS_TENSORRT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        trt: Any = importlib.import_module("tensorrt")
    except Exception as error:
        raise Unavailable(f"{edition} cannot be imported: {error}") from error
    if "SIMULATION" in (trt.__doc__ or ""):
        edition = "the tests' simulation of TensorRT"
    text = f"{edition}, with the interface of {trt.__version__}"
    if edition.startswith("TensorRT-RTX"):
        rtx: Any = importlib.import_module("tensorrt_rtx_bindings")
        chip = "SM{}{}".format(*capability)
        if chip not in rtx.ComputeCapability.__members__:
            here = ", ".join(name for name in rtx.ComputeCapability.__members__ if name[:2] == "SM")
            raise Unavailable(f"TensorRT-RTX {rtx.__version__} has no {chip}: it has {here}")
        text = f"TensorRT-RTX {rtx.__version__}{text.removeprefix('TensorRT-RTX')}"
    return text, version_of(trt.__version__)


class Tried:
    """What was tried and what came of it; what cannot be is a goal that is not met."""

    def __init__(self, devices: Devices, version: tuple[int, int], *, quick: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.goals: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._devices = devices
        self._version = version
        self._quick = quick
        self._repeats = 2 if quick else 300
        self._stream = Stream(devices.gpu())
        self._pool = BufferPool(devices.gpu(), 64 << 20, "inputs")
        source = open_source("synthetic://road?seed=7&fps=0")
        self._frame = Tensor(bgr_of(source.read().image)[np.newaxis])
        source.close()
        self._image = np.random.default_rng(0).random((1, 3, 360, 640), np.float32)
        # What is right, by ONNX Runtime on the CPU; None where that is not here.
        self._expected: NDArray[Any] | None = None
        self._lanes: NDArray[Any] | None = None
        logging.getLogger("edge_server").addHandler(_Warnings(self.notes))

    def everything(self, folder: Path) -> Iterator[None]:
        """Yields after each part; those that are quickly built come first."""
        self._calculate_expected()
        for datatype in ["FP32", "FP16"] if self._version >= (10, 0) else ["FP32"]:
            name = f"two profiles, {datatype}"
            place = folder / f"typed-{datatype}"
            self._one(name, lambda p=place, d=datatype, n=name: self._two_profiles(p, d, n))
            yield
        # A build of the shipped network takes minutes on a small board.
        precisions = ["fp32"] if self._version >= (11, 0) else ["fp16", "fp32"]
        for precision in precisions[:1] if self._quick else precisions:
            name = f"the shipped network, {precision.upper()}"
            self._one(name, lambda p=precision, n=name: self._network(folder / p, p, n))
            yield
        try:
            self._onnxruntime()
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's are of many kinds
            self.notes.append(f"not compared with ONNX Runtime on CUDA: {error}")
        self.notes.append("torch: not compared with, as it reads no ONNX file")
        yield

    def _one(self, name: str, work: Any) -> None:
        """`work`, whose refusal is told and costs no other its turn."""
        try:
            work()
        except DeviceLost:
            raise
        except EdgeServerError as error:
            self.notes.append(f"{name}: {error}")
            self._goal(f"{name}: built and run", "refused, see the notes", met=False)

    def _network(self, folder: Path, precision: str, name: str) -> None:
        build_s = with_plan(folder, precision)
        config = folder / NETWORK / "config.pbtxt"
        text = config.read_text()
        for graphs in (False, True):
            config.write_text(text + GRAPHS[graphs])
            how = f"{name}, {'with' if graphs else 'without'} CUDA graphs"
            told = len(self.notes)
            with serving(self._devices, folder) as snapshot:
                row = self._asked(snapshot, how, TOLERANCES[precision])
                row["build_s"] = build_s
                self._behind_preprocessing(snapshot, row)
            if graphs:
                refused = [note for note in self.notes[told:] if "CUDA graphs" in note]
                self._goal(
                    f"{name}: recorded as a CUDA graph",
                    "no, see the notes" if refused else "yes",
                    met=not refused,
                )

    def _asked(self, snapshot: Snapshot, name: str, tolerance: float) -> dict[str, Any]:
        """A row: how far off it is, and how long a request takes."""
        on_host = InferRequest(NETWORK, {"input": Tensor(self._image)})
        planes = self._on_device(self._image)
        there = InferRequest(NETWORK, {"input": Tensor(planes)}, on_device=True)
        made = snapshot.infer(on_host).outputs["predict_lanes"].array
        made_there = _waited(snapshot.infer(there).outputs["predict_lanes"])
        before = _copies(snapshot, NETWORK)
        device_ms = host_ms(
            lambda: _waited(snapshot.infer(there).outputs["predict_lanes"]), self._repeats
        )
        copied = _copies(snapshot, NETWORK) - before
        row = {
            "network": name,
            "request_ms": device_ms,
            "request_from_host_ms": host_ms(lambda: snapshot.infer(on_host), self._repeats),
            "copies_of_device_tensors": copied,
        }
        if self._expected is not None:
            outputs = (made, made_there.on_host())
            row["largest_error"] = max(_error(output, self._expected) for output in outputs)
            row["largest_value"] = largest = float(np.abs(self._expected).max())
            self._goal(
                f"{name}: within {tolerance:g} of ONNX Runtime's largest value, on the CPU",
                row["largest_error"] / largest,
                met=row["largest_error"] <= tolerance * largest,
            )
        self._goal(f"{name}: no copy of tensors on the device", copied, met=not copied)
        self.rows.append(row)
        print(
            f"{name}: {device_ms:.3f} ms a request with tensors on the GPU, "
            f"{row['request_from_host_ms']:.3f} ms from the host; off by up to "
            f"{row.get('largest_error')} of at most {row.get('largest_value')}",
            flush=True,
        )
        return row

    def _behind_preprocessing(self, snapshot: Snapshot, row: dict[str, Any]) -> None:
        request = InferRequest(CHAIN, {"image": self._frame})

        def between() -> int:
            made = snapshot.find(PREPROCESS, "").statistics.counts().copies["to_host"].count
            read = snapshot.find(NETWORK, "").statistics.counts().copies["to_device"].count
            return int(made + read)

        before = between()
        row["frame_ms"] = host_ms(lambda: snapshot.infer(request), self._repeats)
        row["copies_after_preprocessing"] = copied = between() - before
        self._goal(
            f"{row['network']}: no copy between preprocessing and network", copied, met=not copied
        )
        if self._lanes is not None:
            lanes = snapshot.infer(request).outputs["lane_points"].array
            row["largest_difference_px"] = off = _error(lanes, self._lanes)
            self._goal(
                f"{row['network']}: lanes within {MOST_DIFFERENCE_PX:g} px of the CPU's",
                off,
                met=off <= MOST_DIFFERENCE_PX,
            )
        print(f"{row['network']}: {row['frame_ms']:.3f} ms a frame, through the shipped ensemble")

    def _two_profiles(self, folder: Path, datatype: str, name: str) -> None:
        numpy_type = np.float16 if datatype == "FP16" else np.float32
        tolerance = TOLERANCES[datatype.lower()]
        text = FREE.replace("TYPE_FP32", f"TYPE_{datatype}")
        if datatype == "FP16":
            text += _parameter("plan_strongly_typed", "true")
        directory = folder / "free"
        (directory / "1").mkdir(parents=True)
        random = np.random.default_rng(1)
        weights = random.standard_normal((WIDTH, WIDTH)).astype(numpy_type)
        (directory / "1" / "model.onnx").write_bytes(relu_of_product(weights))
        _build(directory, text)
        for graphs in (False, True):
            (directory / "config.pbtxt").write_text(text + GRAPHS[graphs])
            off = 0.0
            with serving(self._devices, folder) as snapshot:
                # There and back, so that the profile changes both ways.
                for batch in (*BATCHES, *BATCHES):
                    x = random.standard_normal((batch, WIDTH)).astype(numpy_type)
                    made = snapshot.infer(InferRequest("free", {"x": Tensor(x)})).outputs["y"]
                    wanted = np.maximum(x.astype(np.float64) @ weights.astype(np.float64), 0)
                    off = max(off, _error(made.array, wanted) / float(wanted.max()))
            batches = ", ".join(map(str, BATCHES))
            how = f"{name}, {'with' if graphs else 'without'} CUDA graphs"
            self.rows.append({"network": how, "largest_error_of_largest_value": off})
            self._goal(
                f"{name}{', CUDA graphs' * graphs}: batches of {batches} within {tolerance:g} of "
                "numpy's largest value",
                off,
                met=off <= tolerance,
            )

    def _onnxruntime(self) -> None:
        """The same requests to the shipped network in ONNX Runtime on CUDA, by the same way."""
        network = OnnxNetwork(self._devices.gpu())
        config = ModelConfig.of(read_model_config(MODELS / NETWORK / "config.pbtxt"))
        loaded = Scheduling().model(config, 1, network)
        entry = ModelEntry(NETWORK, 1, ModelState.READY, loaded=loaded)
        try:
            self._asked(Snapshot({(NETWORK, 1): entry}), network.name, TOLERANCES["fp32"])
        finally:
            loaded.close()

    def _calculate_expected(self) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            self.notes.append("onnxruntime is not here: nothing says what is right")
            self._goal("outputs compared with ONNX Runtime on the CPU", None, met=False)
            return
        with serving(Devices(), MODELS, gpus=0) as snapshot:
            made = snapshot.infer(InferRequest(NETWORK, {"input": Tensor(self._image)}))
            self._expected = made.outputs["predict_lanes"].array.copy()
            lanes = snapshot.infer(InferRequest(CHAIN, {"image": self._frame}))
            self._lanes = lanes.outputs["lane_points"].array.copy()

    def _on_device(self, array: NDArray[Any]) -> CudaArray:
        there = self._pool.take(self._stream, array.shape, array.dtype)
        self._stream.to_device(there, array)
        there.written(self._stream)
        self._stream.synchronize()
        return there

    def _goal(self, goal: str, reached: object, *, met: bool) -> None:
        self.goals.append({"goal": goal, "reached": reached, "met": met})


@contextmanager
def serving(devices: Devices, repository: Path, *, gpus: int | None = None) -> Iterator[Snapshot]:
    """The models of `repository`, as the daemon loads them where there are so many GPUs; by
    default all.

    Raises:
        Unavailable: one of them cannot be loaded.
    """
    registry = ModelRegistry()
    completion = Completion(
        gpus=devices.count if gpus is None else gpus, no_gpu=devices.reason or "none is asked for"
    )
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry), Build(devices=devices)),
        Repositories([repository]),
        completion=completion,
    )
    try:
        for failed in loader.load_all():
            raise Unavailable(f"model '{failed.name}': {failed.reason}")
        yield registry.snapshot
    finally:
        registry.clear()
        registry.wait_closed(10.0)


def with_plan(folder: Path, precision: str) -> float:
    """Copy the shipped models to `folder`, the network as a plan that is built here.

    Returns:
        How long its build took, in seconds.

    Raises:
        EdgeServerError: it cannot be built.
    """
    for other in (PREPROCESS, DECODE, CHAIN):
        shutil.copytree(MODELS / other, folder / other)
    directory = folder / NETWORK
    (directory / "1").mkdir(parents=True)
    shutil.copyfile(MODELS / NETWORK / "1" / "model.onnx", directory / "1" / "model.onnx")
    return _build(directory, LANES + _parameter("plan_precision", precision))


def _build(directory: Path, text: str) -> float:
    """The plan of `directory`, for its configuration; how long it took, in seconds."""
    path = directory / "config.pbtxt"
    path.write_text(text)
    config = ModelConfig.of(read_model_config(path))
    onnx = directory / "1" / "model.onnx"
    plan = onnx.with_name("model.plan")
    return make_plan(onnx, plan, build_options_of(config), build, lambda _: None).build_s


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def _copies(snapshot: Snapshot, model: str) -> int:
    copies = snapshot.find(model, "").statistics.counts().copies
    return sum(counted.count for counted in copies.values())


def _waited(tensor: Tensor) -> Any:
    """The array on the device, when the work on it is through."""
    array: Any = tensor.on_device
    array.ready.wait()
    return array


def _error(made: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Infinite where they cannot be compared."""
    if made.shape != wanted.shape or not np.isfinite(made).all():
        return float("inf")
    return float(np.abs(made - wanted).max())


class _Warnings(logging.Handler):
    """What the server would have logged."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())


if __name__ == "__main__":
    sys.exit(main())
