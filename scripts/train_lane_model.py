"""Trains the lane network, exports it to ONNX, measures it and writes its model card.

    python scripts/train_lane_model.py --minutes 75
    python scripts/train_lane_model.py --export-only --overlays overlays/

Needs the `train` extra and no GPU. A run that was stopped goes on from its checkpoint. Without
the data folder it trains on rendered roads alone, which is enough for the demo camera and says
nothing about real ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Waiting threads must not spin: the loader process needs the cores as well. Read on import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
from lane_training.export import export, infer, latency_ms, session, verify  # noqa: E402
from lane_training.model_card import Run, measure_model, write_card  # noqa: E402
from lane_training.network import LaneNetwork  # noqa: E402
from lane_training.overlays import write_overlays  # noqa: E402
from lane_training.samples import as_array, rendered_set  # noqa: E402
from lane_training.trainer import Plan, train  # noqa: E402

VERIFICATION_IMAGES, VERIFICATION_SEED = 8, 4242
LATENCY_THREADS = 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "lanes")
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "laneDetect_model")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "lane_training.pt")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=75.0, help="of training, over restarts")
    length.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    parser.add_argument("--export-only", action="store_true", help="from the checkpoint as it is")
    parser.add_argument("--overlays", type=Path, help="also draw held-out images into this folder")
    return parser.parse_args()


def main() -> None:
    """Train, export, verify, measure, describe."""
    options = arguments()
    torch.set_num_threads(options.threads)
    data = options.data if options.data.is_dir() else None
    if data is None:
        print(f"{options.data} is not there: rendered roads only, no figures for real ones")
    if options.export_only:
        state = torch.load(options.checkpoint, weights_only=True)
    else:
        plan = Plan(
            minutes=options.minutes,
            steps=options.steps,
            batch=options.batch,
            rate=options.rate,
            seed=options.seed,
            checkpoint=options.checkpoint,
            data=data,
        )
        state = train(plan)
    network = LaneNetwork()
    network.load_state_dict(state["average"])
    network.eval()

    model_file = options.out / "1" / "model.onnx"
    export(network, model_file)
    images = as_array(rendered_set(VERIFICATION_IMAGES, VERIFICATION_SEED))
    difference = verify(network, model_file, images)
    print(f"{model_file}: {model_file.stat().st_size / 1e6:.2f} MB, differs by {difference:.1g}")

    runtime = session(model_file)
    figures = measure_model(lambda bgr: infer(runtime, bgr), data)
    run = Run(
        steps=state["step"],
        batch=state["batch"],
        minutes=state["elapsed_s"] / 60.0,
        seed=state["seed"],
        network=network,
        model_file=model_file,
        latency_ms=latency_ms(model_file, LATENCY_THREADS),
        difference=difference,
    )
    card = options.out / "MODEL_CARD.md"
    write_card(card, run, figures)
    print(card.read_text())
    if options.overlays:
        count = write_overlays(
            options.overlays, data, lambda bgr: infer(runtime, bgr), figures.threshold
        )
        print(f"{options.overlays}: {count} pictures")


if __name__ == "__main__":
    main()
