"""Trains the example network for vehicles and the drivable area, on rendered roads alone.

    python training/train_vehicle_network.py --minutes 15
    python training/train_vehicle_network.py --export-only

Needs the extra [train] and no GPU. The roads are drawn once, before the first step; a run that was
stopped goes on from its checkpoint. It begins with the first layers of the lane network. What is
made is 1/model.onnx of the example, and a table of how well it sees roads that are new to it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Waiting threads must not spin: the processes that draw need the cores as well. Read on import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main() -> None:
    """Draw, train, export, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, over restarts")
    parser.add_argument("--pictures", type=int, default=4000, help="that are trained on")
    parser.add_argument("--measured", type=int, default=400, help="that each figure is of")
    parser.add_argument(
        "--threads", type=int, default=2, help="of PyTorch, and processes that draw"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "vehicle_network",
        metavar="DIR",
        help="the drawn roads and the checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "examples" / "networks",
        metavar="DIR",
        help="the repository whose road_objects/1/model.onnx is replaced (default: %(default)s)",
    )
    parser.add_argument("--export-only", action="store_true", help="from the checkpoint as it is")
    options = parser.parse_args()
    # After the command line is read: its help needs none of what this imports.
    from lane_training.vehicle_network import draw, export, measure, train  # noqa: PLC0415

    options.work.mkdir(parents=True, exist_ok=True)
    checkpoint = options.work / "checkpoint.pt"
    if not options.export_only:
        roads = draw(options.work / "roads.npz", options.pictures, options.threads)
        lanes = ROOT / "models" / "laneDetect_model" / "1" / "model.onnx"
        train(roads, checkpoint, options.minutes, options.threads, lanes)
    export(checkpoint, options.out / "road_objects" / "1" / "model.onnx")
    print(measure(options.out, options.measured))


if __name__ == "__main__":
    main()
