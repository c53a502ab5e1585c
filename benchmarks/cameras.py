"""How cameras share one model: frames per camera, ages, drops, processor time.

    python benchmarks/cameras.py [--run-ms MS] [--seconds S] [--batch ROWS] [--cameras 1,2,4,8]
                                 [--networks MS,MS,...] [--verdicts N] [--shadow PAIRS]

Each row runs so many cameras, each with images of another size, through the camera loop and an
ensemble whose network takes `--run-ms` for a run and whose other steps take 1 ms. All cameras
deliver 30 frames a second ("even"), or 15 to 60 ("mixed"). A camera's share is the number of its
frames that got lanes; max/min is over cameras that offer more frames than an even share. `age` is
from capture until the listeners get the lanes; `CPU` is the process's time for one camera, in
percent of one processor.

`--networks 200,5` gives each camera other networks beside the lanes, which take so many ms for a
run; each has a line with its results a second and their ages. A simulated run sleeps: what networks
cost each other on one processor or GPU does not show.

`--verdicts 20` runs no camera: it judges candidates for the shipped network's lanes in 700 frames
of drawn roads. They are that network with noise on its weights: 20 as good, 20 a little worse and
20 far worse.

`--shadow 10` measures what a shadow costs the lanes that are served: the age of the shipped
network's lanes on one camera of 5 frames a second, in so many pairs of `--seconds` each, without a
shadow and with a copy of the network as shadow. Which of a pair comes first alternates.

With `--rtsp` the cameras are RTSP streams on loopback, at a third of those rates, which a reader
decodes; their ages count from the time in the pixels, before the camera encodes them. Where the
rates are even, one encoder serves all cameras.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import onnx
from appliance import readers, shown_ns, stamped_cameras
from google.protobuf import text_format
from onnx import numpy_helper
from record import add_option, record
from support.live_cameras.rtsp import what_is_missing
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import TensorModel
from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame, Pace, UsefulSize
from edge_server.cameras.source import SourceKind, open_source
from edge_server.cameras.source_uri import NO_OPTIONS, SourceOptions
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import LoadedModel, ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.lanes.agreement import LaneAgreement
from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_model import LaneModel
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.networks import NetworkPipeline
from edge_server.pixels import Image
from edge_server.requests import InferRequest
from edge_server.settings import NetworkSection
from edge_server.tensors import Tensor
from edge_server.tools.plan import load_models

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import Tensors
    from edge_server.cameras.source_uri import SourceUri
    from edge_server.lanes.types import Lane, LaneFrame
    from edge_server.pipeline.perception import NetworkFrame

RATES_FPS = {"even": (30.0,) * 8, "mixed": (60.0, 30.0, 15.0, 50.0, 20.0, 45.0, 25.0, 55.0)}
WARM_UP_S = 1.0
RTSP_WARM_UP_S = 5.0
ONE_LANE = np.full((1, 1, 72, 2), 100, np.float32)


class SteadyCamera:
    """A FrameSource that delivers changing images at a steady rate, at no cost."""

    corrupt = 0

    def __init__(self, uri: SourceUri, _options: SourceOptions) -> None:
        self._pace = Pace(uri.fps() or 30.0)
        width = uri.whole("width", 128, 16, 4096)
        noise = np.random.default_rng(width).integers(0, 255, (7, 72, width, 3), np.uint8)
        self._images = cycle(Image.of_bgr(image) for image in noise)

    def read(self) -> Frame:
        self._pace.wait()
        return Frame.arrived(0, next(self._images))

    def close(self) -> None:
        """Nothing to release."""


KINDS = {"steady": SourceKind(SteadyCamera, live=True)}


@dataclass
class Row:
    """What one run gave, camera by camera."""

    fps: tuple[float, ...]
    stamped: bool = False
    ages_ms: dict[str, list[float]] = field(default_factory=dict)
    captured: int = 0
    dropped: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    client_requests: int = 0
    network_ages_ms: dict[str, list[float]] = field(default_factory=dict)

    def note_network(self, frame: NetworkFrame) -> None:
        age_ms = frame.age_ns(time.monotonic_ns()) / 1e6
        self.network_ages_ms[frame.network].append(age_ms)

    def network_lines(self) -> list[str]:
        lines = []
        for name, ages in self.network_ages_ms.items():
            p50, p99 = np.percentile(ages, (50, 99)) if ages else (np.nan, np.nan)
            rate = len(ages) / self.wall_s
            lines.append(f"  {name:8} {rate:9.1f} results/s, age p50 {p50:.1f}, p99 {p99:.1f} ms")
        return lines

    def note(self, lane_frame: LaneFrame, frame: Frame | None) -> None:
        if frame is None or lane_frame.failure:
            return
        now_ns = time.monotonic_ns()
        at_ns = shown_ns(frame) if self.stamped else frame.capture_mono_ns
        if at_ns is not None:
            self.ages_ms[lane_frame.camera].append((now_ns - at_ns) / 1e6)

    def values(self) -> dict[str, float]:
        """Return the row's numbers; `core` is of each camera, `share` of its frames."""
        ages = np.concatenate([np.array(each) for each in self.ages_ms.values()])
        shares = [len(each) / self.wall_s for each in self.ages_ms.values()]
        even = sum(shares) / len(shares)
        # A camera that offers less than an even share gets all that it offers.
        wants_more = [s for s, fps in zip(shares, self.fps, strict=True) if fps > 1.1 * even]
        ratio = max(wants_more) / max(1e-9, min(wants_more)) if wants_more else 1.0
        p50, p99 = np.percentile(ages, (50, 99)) if len(ages) else (np.nan, np.nan)
        return {
            "per s": sum(shares),
            "least per s": min(shares),
            "most per s": max(shares),
            "ratio": ratio,
            "age p50 ms": p50,
            "age p99 ms": p99,
            "dropped share": self.dropped / self.captured,
            "core": self.cpu_s / self.wall_s / len(shares),
            "clients per s": self.client_requests / self.wall_s,
        }


# A lane model of three steps, as the shipped one; a quick step takes 1 ms.
IMAGE = "data_type: TYPE_UINT8 dims: [-1, -1, -1]"
POINTS = "data_type: TYPE_FP32 dims: [-1, 72, 2]"
CONFIGS = {
    "scale": f'input {{ name: "image" {IMAGE} }} '
    'output { name: "x" data_type: TYPE_FP32 dims: 4 }',
    "network": 'input { name: "x" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 4 }',
    "decode": 'input { name: "y" data_type: TYPE_FP32 dims: 4 } '
    f'output {{ name: "lane_points" {POINTS} }} '
    'output { name: "lane_scores" data_type: TYPE_FP32 dims: -1 }',
}
ENSEMBLE = f"""
name: "lane_detection" platform: "ensemble" max_batch_size: 1
input {{ name: "image" {IMAGE} }}
output {{ name: "lane_points" {POINTS} }}
output {{ name: "lane_scores" data_type: TYPE_FP32 dims: -1 }}
ensemble_scheduling {{
  step {{ model_name: "scale" model_version: -1
    input_map {{ key: "image" value: "image" }} output_map {{ key: "x" value: "x" }} }}
  step {{ model_name: "network" model_version: -1
    input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }}
  step {{ model_name: "decode" model_version: -1
    input_map {{ key: "y" value: "y" }}
    output_map {{ key: "lane_points" value: "lane_points" }}
    output_map {{ key: "lane_scores" value: "lane_scores" }} }}
}}
"""
QUICK_S = 0.001


def lane_model(run_s: float, batch_rows: int, networks_ms: Sequence[float] = ()) -> DataPlane:
    """Return a data plane with a lane model, whose network takes `run_s` for any number of rows,
    and with other networks that take so many ms."""

    def scale(inputs: Tensors, _outputs: frozenset[str]) -> Tensors:
        time.sleep(QUICK_S)
        return {"x": Tensor(np.zeros((len(inputs["image"].array), 4), np.float32))}

    def network(inputs: Tensors, _outputs: frozenset[str]) -> Tensors:
        time.sleep(run_s)
        return {"y": inputs["x"]}

    def decode(inputs: Tensors, _outputs: frozenset[str]) -> Tensors:
        time.sleep(QUICK_S)
        rows = len(inputs["y"].array)
        return {
            "lane_points": Tensor(np.repeat(ONE_LANE, rows, 0)),
            "lane_scores": Tensor(np.ones((rows, 1), np.float32)),
        }

    scheduling, registry = Scheduling(), ModelRegistry()
    for run in (scale, network, decode):
        name = run.__name__
        batching = f"max_batch_size: {batch_rows if run is network else 1} "
        if run is network and batch_rows > 1:
            batching += "dynamic_batching { } "
        text = f'name: "{name}" backend: "identity" instance_group {{ count: 1 }} {batching}'
        config = _config(text + CONFIGS[name])
        _load(registry, scheduling.model(config, 1, TensorModel(run)))
    _load(registry, scheduling.ensemble(_config(ENSEMBLE), 1))
    for name, ms in networks(networks_ms):

        def other(_inputs: Tensors, _outputs: frozenset[str], ms: float = ms) -> Tensors:
            time.sleep(ms / 1e3)
            return {"f": Tensor(np.zeros((1, 8), np.float32))}

        text = (
            f'name: "{name}" backend: "identity" instance_group {{ count: 1 }} max_batch_size: 1 '
        )
        text += f'input {{ name: "image" {IMAGE} }} '
        text += 'output { name: "f" data_type: TYPE_FP32 dims: 8 }'
        _load(registry, scheduling.model(_config(text), 1, TensorModel(other)))
    return DataPlane(registry)


def networks(networks_ms: Sequence[float]) -> list[tuple[str, float]]:
    """Return the names of other networks, and what each takes."""
    return [(f"n{number}_{ms:g}ms", ms) for number, ms in enumerate(networks_ms)]


def _config(text: str) -> ModelConfig:
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def _load(registry: ModelRegistry, loaded: LoadedModel) -> None:
    entry = ModelEntry(loaded.name, 1, ModelState.READY, loaded=loaded)
    registry.replace(loaded.name, [entry])


def run_row(fps: tuple[float, ...], uris: list[str], arguments: argparse.Namespace) -> Row:
    """Run cameras with these sources at the rates `fps` side by side."""
    data_plane = lane_model(arguments.run_ms / 1e3, arguments.batch, arguments.networks)
    network_shares = FairShares()
    names = [name for name, _ in networks(arguments.networks)]
    row = Row(fps, bool(arguments.rtsp), {f"camera{n}": [] for n in range(len(fps))})
    options = SourceOptions(reader=arguments.reader) if arguments.rtsp else NO_OPTIONS
    shares = FairShares()
    pipelines = [
        LanePipeline(
            Camera(name, uri, kinds=None if arguments.rtsp else KINDS, options=options),
            data_plane,
            "lane_detection",
            [row.note],
            shares=shares,
            networks=[
                NetworkPipeline(
                    name,
                    network,
                    NetworkSection(network, deadline_ms=1000),
                    data_plane,
                    [row.note_network],
                    shares=network_shares,
                )
                for network in names
            ],
        )
        for name, uri in zip(row.ages_ms, uris, strict=True)
    ]
    row.network_ages_ms = {name: [] for name in names}
    loops = [worker for p in pipelines for worker in (p.worker, *(n.worker for n in p.networks))]
    stop = threading.Event()
    clients = [
        threading.Thread(target=partial(_request, data_plane, row, stop))
        for _ in range(arguments.clients)
    ]
    for pipeline in pipelines:
        pipeline.camera.start()
    for worker in loops:
        worker.start()
    for client in clients:
        client.start()
    time.sleep(RTSP_WARM_UP_S if arguments.rtsp else WARM_UP_S)
    for ages in (*row.ages_ms.values(), *row.network_ages_ms.values()):
        ages.clear()
    before = [(p.camera.captured, p.camera.dropped + p.too_old_frames) for p in pipelines]
    row.client_requests = 0
    cpu_s, began = time.process_time(), time.monotonic()
    time.sleep(arguments.seconds)
    row.cpu_s, row.wall_s = time.process_time() - cpu_s, time.monotonic() - began
    row.captured = sum(p.camera.captured - b[0] for p, b in zip(pipelines, before, strict=True))
    row.dropped = sum(
        p.camera.dropped + p.too_old_frames - b[1] for p, b in zip(pipelines, before, strict=True)
    )
    stop.set()
    for worker in (*loops, *(p.camera.worker for p in pipelines)):
        worker.ask_to_stop()
    for worker in loops:
        worker.stop()
    for pipeline in pipelines:
        pipeline.camera.stop()
    for client in clients:
        client.join()
    return row


def _request(data_plane: DataPlane, row: Row, stop: threading.Event) -> None:
    """Send one request after the other, as a client does."""
    image = Tensor(np.zeros((1, 72, 128, 3), np.uint8))
    while not stop.is_set():
        data_plane.infer(InferRequest("lane_detection", {"image": image}))
        row.client_requests += 1


# Noise on the weights of the convolutions, in their standard deviations. With up to 0.3 the lanes
# of drawn roads are about as right as without; with 0.6 their accuracy falls by 0.04 (0.97
# without); from 0.9 on most lines are missed.
_NOISE = {"equal": (0.1, 0.2, 0.3), "little worse": (0.6,), "worse": (0.9, 1.2, 1.6)}
_ROADS = ("seed=7", "seed=8", "seed=12&conditions=rain")
VERDICT_FRAMES = 702


def print_verdicts(count: int) -> None:
    """Judge so many candidates of each kind."""
    models = Path(__file__).parents[1] / "models"
    shipped = models / "laneDetect_model/1/model.onnx"
    frames = []
    for road in _ROADS:
        source = open_source(f"synthetic://road?{road}&fps=0")
        frames += [source.read() for _ in range(VERDICT_FRAMES // len(_ROADS))]
        source.close()

    def lanes_with(network: bytes) -> list[tuple[Lane, ...]]:
        with ExitStack() as stack:
            repository = Path(stack.enter_context(TemporaryDirectory())) / "models"
            shutil.copytree(models, repository)
            (repository / "laneDetect_model/1/model.onnx").write_bytes(network)
            plane = load_models(repository, stack)
            model = LaneModel(plane, "lane_detection", UsefulSize(), FairShares())
            return [model.detect(f).lanes for f in frames]

    served = lanes_with(shipped.read_bytes())
    for kind, deviations in _NOISE.items():
        outcomes: Counter[str] = Counter()
        for seed, deviation in zip(range(count), cycle(deviations), strict=False):
            agreement = LaneAgreement()
            made = lanes_with(with_noise(shipped, deviation, seed))
            for frame, lanes, candidates in zip(frames, served, made, strict=True):
                given = {"size": frame.size, "candidate_us": 20_000, "served_us": 20_000}
                agreement.add(lanes, candidates, frame.capture_mono_ns, **given)
            outcomes[agreement.verdict().outcome] += 1
        print(f"{kind:12} {count:3}: {dict(outcomes)}", flush=True)


def with_noise(network: Path, deviations: float, seed: int) -> bytes:
    """Return the network with noise on the weights of its convolutions."""
    generator = np.random.default_rng(seed)
    model = onnx.load(network)
    for each in model.graph.initializer:
        weights = numpy_helper.to_array(each)
        if weights.ndim == 4:
            noise = generator.normal(0, deviations * weights.std(), weights.shape)
            each.CopyFrom(numpy_helper.from_array(np.float32(weights + noise), each.name))
    return bytes(model.SerializeToString())


def lane_ages_ms(plane: DataPlane, seconds: float, *, shadow: bool) -> list[float]:
    """Return the ages of the served lanes of one camera, with a shadow or without."""
    ages: list[float] = []

    def note(lane_frame: LaneFrame, frame: Frame | None) -> None:
        if frame is not None and not lane_frame.failure:
            ages.append(lane_frame.age_ns(time.monotonic_ns()) / 1e6)

    section = NetworkSection("candidate", shadow_of="lanes", deadline_ms=1000)
    network = NetworkPipeline(
        "front", "new", section, plane, [], shares=FairShares(), served="lane_detection"
    )
    pipeline = LanePipeline(
        Camera("front", "steady://it?fps=5&width=1280", kinds=KINDS),
        plane,
        "lane_detection",
        [note],
        shares=FairShares(),
        networks=[network] if shadow else [],
    )
    loops = [pipeline.worker, *(each.worker for each in pipeline.networks)]
    pipeline.camera.start()
    for worker in loops:
        worker.start()
    time.sleep(WARM_UP_S)
    ages.clear()
    time.sleep(seconds)
    found = list(ages)
    for worker in (*loops, pipeline.camera.worker):
        worker.ask_to_stop()
    for worker in loops:
        worker.stop()
    pipeline.camera.stop()
    if shadow:
        print(f"  shadow: {network.frames} frames, {dict(network.missed)}", flush=True)
    return found


def print_shadow(pairs: int, seconds: float) -> dict[str, float]:
    """Compare the served lanes' ages without a shadow and with one; return the medians of pairs."""
    values: dict[str, float] = {}
    ages: dict[bool, list[list[float]]] = {False: [], True: []}
    with ExitStack() as stack:
        repository = Path(stack.enter_context(TemporaryDirectory())) / "models"
        shutil.copytree(Path(__file__).parents[1] / "models", repository)
        for name, made in (("laneDetect_model", "candidate_net"), ("lane_detection", "candidate")):
            shutil.copytree(repository / name, repository / made)
            config = repository / made / "config.pbtxt"
            text = config.read_text().replace("laneDetect_model", "candidate_net")
            config.write_text(text.replace("lane_detection", "candidate"))
        plane = load_models(repository, stack)
        for pair in range(pairs):
            for shadow in (bool(pair % 2), not pair % 2):
                ages[shadow].append(lane_ages_ms(plane, seconds, shadow=shadow))
    alone, beside = (np.array([np.percentile(a, (50, 99)) for a in ages[s]]) for s in (False, True))
    for place, name in enumerate(("median", "p99")):
        low, middle, high = np.percentile(beside[:, place] / alone[:, place], (25, 50, 75))
        whole = (np.percentile(np.concatenate(ages[s]), (50, 99)[place]) for s in (False, True))
        print("{}: alone {:.1f} ms, beside a shadow {:.1f} ms".format(name, *whole), end="; ")
        print(f"of a pair {middle:.3f} ({low:.3f} to {high:.3f})")
        values[f"{name} of a pair"] = middle
    frames = [sum(map(len, ages[shadow])) for shadow in (False, True)]
    print(f"frames with lanes: {frames[0]} alone, {frames[1]} beside")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=1, help="rows; above 1: dynamic batching")
    parser.add_argument("--clients", type=int, default=0, help="that send requests beside them")
    parser.add_argument("--cameras", default="1,2,4,8")
    parser.add_argument(
        "--networks",
        type=lambda text: [float(ms) for ms in text.split(",")],
        default=[],
        metavar="MS,MS,...",
        help="other networks beside the lanes",
    )
    parser.add_argument("--verdicts", type=int, default=0, help="so many candidates of each kind")
    parser.add_argument("--shadow", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--rtsp", metavar="WIDTHxHEIGHT", help="RTSP cameras of this size")
    parser.add_argument("--reader", default=readers()[0], choices=["gstreamer", "opencv"])
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.verdicts:
        print_verdicts(arguments.verdicts)
        return
    if arguments.shadow:
        record(arguments.record, print_shadow(arguments.shadow, arguments.seconds))
        return
    if arguments.rtsp and (missing := what_is_missing()):
        sys.exit(missing)
    print(f"model: {arguments.run_ms:g} ms a run, {arguments.batch} rows", end="")
    print(f"; RTSP {arguments.rtsp}, {arguments.reader}" if arguments.rtsp else "")
    heads = ["frames/s", "min", "max", "max/min", "age-p50", "p99-ms", "dropped", "CPU", "clients"]
    print(f"{'rates':7} cameras", " ".join(f"{head:>9}" for head in heads))
    found: dict[str, float] = {}
    for name, fps in RATES_FPS.items():
        for cameras in map(int, arguments.cameras.split(",")):
            rates = fps[:cameras]
            if arguments.rtsp:
                rates = tuple(each / 3 for each in rates)
                width, height = map(int, arguments.rtsp.split("x"))
                sources = stamped_cameras(rates, (width, height))
            else:
                stills = zip(rates, count(128, 16), strict=False)
                sources = nullcontext([f"steady://it?fps={f:g}&width={w}" for f, w in stills])
            with sources as uris:
                row = run_row(rates, uris, arguments)
            values = row.values()
            line = " ".join(f"{value:9.2f}" for value in values.values())
            print("\n".join([f"{name:7} {cameras:7} {line}", *row.network_lines()]), flush=True)
            found |= {f"{name} {cameras} {key}": value for key, value in values.items()}
    record(arguments.record, found)


if __name__ == "__main__":
    main()
