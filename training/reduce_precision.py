"""Makes the networks in INT8 and FP16 that lie beside the shipped one, from its weights.

    python training/reduce_precision.py [--network models/laneDetect_model/1/model.onnx]

`model_int8.onnx` has Q/DQ nodes around the convolutions, symmetric, with a scale for each channel
of the weights; the scales of the activations are the ranges on rendered roads, and on no picture of
a camera. `model_fp16.onnx` calculates in FP16, but for the last sum, whose x reaches the thousands.
Run it again for each network, and measure: docs/training.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import onnx
from lane_training.roads import LONGEST_DRIVE_M, render_road, sample_road

from edge_server.backends.tensorrt.plan_options import MADE_OF, precision_file, sha256_of
from edge_server.lanes.decode import INPUT_WIDTH_PX
from edge_server.tools.convert.steps.onnx_models import to_fp16, to_int8
from edge_server.tools.convert.steps.step import StepJob

if TYPE_CHECKING:
    from edge_server.backends.tensorrt.plan_options import Precision

SHIPPED = Path(__file__).parent.parent / "models" / "laneDetect_model" / "1" / "model.onnx"
INPUT_HEIGHT_PX = 360
# Neither training nor a measurement draws roads of this seed.
CALIBRATION_SEED = 640_001
ROADS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--network", type=Path, default=SHIPPED)
    parser.add_argument("--roads", type=int, default=ROADS, help="rendered for the scales of INT8")
    arguments = parser.parse_args()
    network: Path = arguments.network
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.onnx"
        job = StepJob(progress=progress, source=str(network), target=str(made))
        to_fp16(job, keep=last_sum(network))
        put(made, network, "fp16")
        to_int8(
            job,
            operators=["Conv", "ConvTranspose"],
            calibration=rendered(Path(folder), arguments.roads),
            per_channel=True,
            optimized=True,
        )
        put(made, network, "int8")
    return 0


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def last_sum(network: Path) -> list[str]:
    """Return the nodes that add the anchors' lines to what was predicted."""
    graph = onnx.load(str(network)).graph
    writers = {output: node for node in graph.node for output in node.output}
    last = writers[graph.output[0].name]
    constants = {tensor.name for tensor in graph.initializer}
    lines = [writers[name] for name in last.input if set(writers[name].input) <= constants]
    return [node.name for node in (last, *lines)]


def rendered(folder: Path, count: int) -> list[str]:
    """Write the network's view of `count` roads, each from a scene of its own; return the files."""
    files = []
    for number in range(count):
        rng = np.random.default_rng((CALIBRATION_SEED, number))
        road, distance_m = sample_road(rng), rng.uniform(0, LONGEST_DRIVE_M)
        bgr, _ = render_road(road, distance_m, INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
        planes = cv2.dnn.blobFromImage(bgr, 1.0 / 255.0)
        files.append(str(folder / f"{number:04}.npy"))
        np.save(files[-1], planes)
    return files


def put(made: Path, network: Path, precision: Precision) -> None:
    model = onnx.load(str(made))
    model.metadata_props.add(key=MADE_OF, value=sha256_of(network))
    path = precision_file(network, precision)
    onnx.save(model, str(path))
    print(f"{path}: {path.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    sys.exit(main())
