"""How cameras share one model: frames per camera, ages, drops, processor time.

    python benchmarks/cameras.py [--run-ms MS] [--seconds S] [--batch ROWS] [--cameras 1,2,4,8]

Each row runs so many cameras through the camera loop and a model that takes `--run-ms` for a run,
all of them at 30 frames a second ("even") or at rates from 15 to 60 ("mixed"). A camera's share is
the number of its frames that got lanes; max/min is over cameras that offer more frames than an even
share. `age` is from capture until the listeners get the lanes; `CPU` is the process's time for one
camera, in percent of one processor.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import TensorModel
from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame, Pace
from edge_server.cameras.source import SourceKind
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.snapshot import ModelEntry, ModelState
from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pixels import Image
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors
    from edge_server.cameras.source import SourceOptions, SourceUri
    from edge_server.lanes.types import LaneFrame

RATES_FPS = {"even": (30.0,) * 8, "mixed": (60.0, 30.0, 15.0, 50.0, 20.0, 45.0, 25.0, 55.0)}
WARM_UP_S = 1.0
ONE_LANE = np.full((1, 1, 72, 2), 100, np.float32)


class StillCamera:
    """A FrameSource that delivers one image at a steady rate, at no cost."""

    def __init__(self, uri: SourceUri, _options: SourceOptions) -> None:
        self._pace = Pace(uri.fps() or 30.0)
        self._image = Image.of_bgr(np.zeros((72, 128, 3), np.uint8))

    def read(self) -> Frame:
        self._pace.wait()
        return Frame.arrived(0, self._image)

    def close(self) -> None:
        """Nothing to release."""


KINDS = {"still": SourceKind(StillCamera, live=True)}


@dataclass
class Row:
    """What one run gave, camera by camera."""

    fps: tuple[float, ...]
    ages_ms: dict[str, list[float]] = field(default_factory=dict)
    captured: int = 0
    dropped: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    client_requests: int = 0

    def note(self, lane_frame: LaneFrame, _frame: Frame) -> None:
        if not lane_frame.failure:
            age_ms = lane_frame.age_ns(time.monotonic_ns()) / 1e6
            self.ages_ms[lane_frame.camera].append(age_ms)

    def line(self) -> str:
        ages = np.concatenate([np.array(each) for each in self.ages_ms.values()])
        shares = [len(each) / self.wall_s for each in self.ages_ms.values()]
        even = sum(shares) / len(shares)
        # A camera that offers less than an even share gets all that it offers.
        wants_more = [s for s, fps in zip(shares, self.fps, strict=True) if fps > 1.1 * even]
        ratio = max(wants_more) / max(1e-9, min(wants_more)) if wants_more else 1.0
        p50, p99 = np.percentile(ages, (50, 99)) if len(ages) else (np.nan, np.nan)
        dropped = 100 * self.dropped / self.captured
        cpu = 100 * self.cpu_s / self.wall_s / len(shares)
        return (
            f"{len(shares):7} {sum(shares):9.1f} {min(shares):6.1f} {max(shares):6.1f} {ratio:8.2f}"
            f" {p50:8.1f} {p99:8.1f} {dropped:6.1f} % {cpu:6.1f} %"
            f" {self.client_requests / self.wall_s:9.1f}"
        )


def lane_model(run_s: float, batch_rows: int) -> DataPlane:
    """Return a data plane with one lane model, whose run takes `run_s` for any number of rows."""

    def run(inputs: Tensors, _outputs: frozenset[str]) -> Tensors:
        time.sleep(run_s)
        rows = len(inputs["image"].array)
        return {
            "lane_points": Tensor(np.repeat(ONE_LANE, rows, 0)),
            "lane_scores": Tensor(np.ones((rows, 1), np.float32)),
        }

    batching = "dynamic_batching { }" if batch_rows > 1 else ""
    text = (
        'name: "lane_detection" backend: "identity" instance_group { count: 1 } '
        f"max_batch_size: {batch_rows} {batching} "
        'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, 3] } '
        'output { name: "lane_points" data_type: TYPE_FP32 dims: [-1, 72, 2] } '
        'output { name: "lane_scores" data_type: TYPE_FP32 dims: -1 } '
    )
    config = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    registry = ModelRegistry()
    loaded = Scheduling().model(config, 1, TensorModel(run))
    entry = ModelEntry("lane_detection", 1, ModelState.READY, loaded=loaded)
    registry.replace("lane_detection", [entry])
    return DataPlane(registry)


def run_row(fps: tuple[float, ...], arguments: argparse.Namespace) -> Row:
    """Run cameras at the rates `fps` side by side."""
    data_plane = lane_model(arguments.run_ms / 1e3, arguments.batch)
    row = Row(fps, {f"camera{n}": [] for n in range(len(fps))})
    shares = FairShares()
    pipelines = [
        LanePipeline(
            Camera(name, f"still://it?fps={rate:g}", kinds=KINDS),
            data_plane,
            "lane_detection",
            [row.note],
            shares=shares,
        )
        for name, rate in zip(row.ages_ms, fps, strict=True)
    ]
    stop = threading.Event()
    clients = [
        threading.Thread(target=partial(_request, data_plane, row, stop))
        for _ in range(arguments.clients)
    ]
    for pipeline in pipelines:
        pipeline.camera.start()
        pipeline.worker.start()
    for client in clients:
        client.start()
    time.sleep(WARM_UP_S)
    for ages in row.ages_ms.values():
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
    for pipeline in pipelines:
        pipeline.worker.ask_to_stop()
        pipeline.camera.worker.ask_to_stop()
    for pipeline in pipelines:
        pipeline.worker.stop()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=1, help="rows; above 1: dynamic batching")
    parser.add_argument("--clients", type=int, default=0, help="that send requests beside them")
    parser.add_argument("--cameras", default="1,2,4,8")
    arguments = parser.parse_args()
    print(f"model: {arguments.run_ms:g} ms a run, {arguments.batch} rows")
    print(
        f"{'rates':7} {'cameras':7} {'frames/s':9} {'min':6} {'max':6} {'max/min':8} {'age p50':8} "
        f"{'p99 ms':8} {'dropped':8} {'CPU':8} {'clients/s':9}"
    )
    for name, fps in RATES_FPS.items():
        for count in map(int, arguments.cameras.split(",")):
            row = run_row(fps[:count], arguments)
            print(f"{name:7} {row.line()}", flush=True)


if __name__ == "__main__":
    main()
