"""Trains the lane network, exports it to ONNX, measures it and writes its model card.

    python training/train_lane_model.py --labels labels.jsonl --images DIR --minutes 75
    python training/train_lane_model.py --labels labels.jsonl --images DIR --export-only

Needs the extra [train] and no GPU; --device cuda uses one. A run that was stopped goes on from its
checkpoint. Without labels it trains on rendered roads alone, which is enough for the demo camera
and says nothing about real ones. Under torchrun several processes train one network.
docs/training.md tells what labels look like.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lane_training.material import Material

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHIPPED_MODEL = ROOT / "models" / "laneDetect_model"
# Waiting threads must not spin: the loader process needs the cores as well. Read on import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

VERIFICATION_IMAGES, VERIFICATION_SEED = 8, 4242
LATENCY_THREADS = 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_argument_group("what to learn from, beside rendered roads")
    source.add_argument(
        "--labels",
        type=Path,
        action="append",
        default=[],
        metavar="FILE|DIR",
        help="JSON lines in TuSimple's form, or a folder of CULane's; repeatable",
    )
    source.add_argument(
        "--images",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="where the paths in the labels begin (default: where the labels are): once for all, "
        "or once for each --labels",
    )
    source.add_argument(
        "--weight",
        type=float,
        action="append",
        default=[],
        metavar="NUMBER",
        help="how often images of a --labels are drawn, beside the root of their number; once for "
        "each --labels (default: 1)",
    )
    source.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of each drive, its end: measured on, never trained on (default: %(default)s)",
    )
    source.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="SOURCE",
        help="a source of the labels that is only measured on; repeatable",
    )
    source.add_argument(
        "--data", type=Path, metavar="DIR", help="a folder as the shipped network was trained on"
    )
    run = parser.add_argument_group("the run")
    length = run.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=float, default=75.0, help="over restarts (default: %(default)g)"
    )
    length.add_argument("--steps", type=int, help="instead of minutes")
    run.add_argument("--batch", type=int, default=16, help="images a step (default: %(default)s)")
    run.add_argument(
        "--rate", type=float, default=1.5e-3, help="highest learning rate (default: %(default)g)"
    )
    run.add_argument("--seed", type=int, default=7, help="(default: %(default)s)")
    run.add_argument("--threads", type=int, default=2, help="of PyTorch (default: %(default)s)")
    run.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    run.add_argument(
        "--loaders",
        type=int,
        default=1,
        metavar="COUNT",
        help="processes that make the images, a core each (default: %(default)s)",
    )
    run.add_argument(
        "--checkpoint",
        type=Path,
        default=ROOT / "build" / "lane_training.pt",
        metavar="FILE",
        help="gone on from where it is there (default: %(default)s)",
    )
    run.add_argument(
        "--save-every",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="between two checkpoints (default: %(default)g)",
    )
    run.add_argument(
        "--other-material",
        action="store_true",
        help="go on from a checkpoint that learnt from something else",
    )
    run.add_argument(
        "--begin-with",
        type=Path,
        metavar="FILE",
        help="a model.onnx of this script's, whose weights are the first (default: random ones)",
    )
    run.add_argument(
        "--late-layers",
        action="store_true",
        help="learn with the layers from stride 32 on alone: half the time, for a small change of "
        "what --begin-with knows; take a low --rate",
    )
    made = parser.add_argument_group("what is made")
    made.add_argument(
        "--keep",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the weights of --begin-with in the exported ones (default: %(default)g)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "laneDetect_model",
        metavar="DIR",
        help="a model, ready for a repository; what is there is replaced (default: %(default)s)",
    )
    part = made.add_mutually_exclusive_group()
    part.add_argument("--export-only", action="store_true", help="from the checkpoint as it is")
    part.add_argument("--train-only", action="store_true", help="make nothing but the checkpoint")
    made.add_argument(
        "--show",
        type=Path,
        metavar="PNG",
        help="draw images as they are trained on, with their labels, and do nothing else",
    )
    made.add_argument("--overlays", type=Path, metavar="DIR", help="draw held-out images there")
    made.add_argument(
        "--notes", type=Path, metavar="FILE", help="Markdown for the end of the model card"
    )
    options = parser.parse_args()
    check_material(parser, options)
    if options.loaders < 1:
        parser.error(f"--loaders {options.loaders}: give 1 or more")
    if options.late_layers and options.begin_with is None:
        parser.error("--late-layers: give --begin-with too; random early layers know nothing")
    if not 0 <= options.keep < 1:
        parser.error(f"--keep {options.keep:g}: give a share from 0 to less than 1")
    if options.keep and options.begin_with is None:
        parser.error("--keep: give --begin-with too")
    for file in (options.notes, options.begin_with):
        if file is not None and not file.is_file():
            parser.error(f"{file}: no such file")
    if options.export_only and not options.checkpoint.is_file():
        parser.error(f"--checkpoint {options.checkpoint}: no such file; train first")
    return options


def check_material(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where the labels' options do not fit together."""
    if options.data and (options.labels or options.images):
        parser.error("--data: give it alone, or --labels and --images")
    if options.leave_out and not (options.data or options.labels):
        parser.error("--leave-out: give --data or --labels too")
    for name in ("images", "weight"):
        given = len(getattr(options, name))
        if given and not options.labels:
            parser.error(f"--{name}: give --labels too")
        if given not in {0, len(options.labels), 1 if name == "images" else 0}:
            parser.error(f"--{name}: give one for each of the {len(options.labels)} --labels")
    if any(not 0 < weight < float("inf") for weight in options.weight):
        parser.error("--weight: give a number above 0")
    for name, folders in (("data", [options.data]), ("images", options.images)):
        for folder in folders:
            if folder is not None and not folder.is_dir():
                parser.error(f"--{name} {folder}: no such folder")
    for file in options.labels:
        if not file.exists():
            parser.error(f"{file}: no such file")
    if not 0 < options.held_out < 1:
        parser.error(f"--held-out {options.held_out:g}: give a share between 0 and 1")


def main() -> None:
    """Train, export, verify, measure, describe."""
    options = arguments()
    # After the command line is read: its help and its mistakes need none of what this imports.
    from lane_training.material import Material, MaterialError, OwnLabels  # noqa: PLC0415

    material = None
    try:
        if options.labels or options.data:
            count = len(options.labels)
            images = options.images * count if len(options.images) == 1 else options.images
            own = zip(
                options.labels,
                images or [None] * count,
                options.weight or [1.0] * count,
                strict=True,
            )
            material = Material(
                options.data,
                tuple(OwnLabels(*each) for each in own),
                options.held_out,
                frozenset(options.leave_out),
            )
            material.require()
        else:
            print("no --labels and no --data: rendered roads only, no figures for real ones")
        make(options, material)
    except MaterialError as error:
        sys.exit(f"train_lane_model: {error}")


def make(options: argparse.Namespace, material: Material | None) -> None:
    """Everything that needs PyTorch.

    Raises: MaterialError: see `read_checkpoint` and `train`.
    """
    try:
        import numpy as np  # noqa: PLC0415
        import torch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        sys.exit(f"train_lane_model: {error}; pip install '.[train,onnxruntime]'")
    from lane_training.export import blend, export, infer, latency_ms, session, verify  # noqa: PLC0415
    from lane_training.model_card import Run, measure_model, write_card  # noqa: PLC0415
    from lane_training.network import LaneNetwork  # noqa: PLC0415
    from lane_training.overlays import draw_curves, show_samples, write_overlays  # noqa: PLC0415
    from lane_training.samples import SampleStream, as_array, rendered_set  # noqa: PLC0415
    from lane_training.trainer import (  # noqa: PLC0415
        LOSSES,
        Plan,
        began_with,
        learnt_from,
        read_checkpoint,
        train,
    )

    if options.show:
        options.show.parent.mkdir(parents=True, exist_ok=True)
        show_samples(options.show, SampleStream(material, np.random.default_rng(options.seed)))
        print(options.show)
        return
    torch.set_num_threads(options.threads)
    plan = Plan(
        minutes=options.minutes,
        steps=options.steps,
        batch=options.batch,
        rate=options.rate,
        seed=options.seed,
        checkpoint=options.checkpoint,
        material=material,
        other_material=options.other_material,
        begin_with=options.begin_with,
        late_layers=options.late_layers,
        device=options.device,
        loaders=options.loaders,
        save_every_s=options.save_every,
    )
    state = read_checkpoint(plan) if options.export_only else train(plan)
    if state is None or options.train_only:
        return
    network = LaneNetwork()
    network.load_state_dict(state["average"])
    network.eval()

    model_file = options.out / "1" / "model.onnx"
    model_file.parent.mkdir(parents=True, exist_ok=True)
    config = options.out / "config.pbtxt"
    if not config.exists():
        shutil.copyfile(SHIPPED_MODEL / "config.pbtxt", config)
        others = shutil.ignore_patterns("rendered.pbtxt")
        shutil.copytree(
            SHIPPED_MODEL / "configs", options.out / "configs", ignore=others, dirs_exist_ok=True
        )
    export(network, model_file)
    if options.keep:
        network = blend(model_file, options.begin_with, options.keep)
    images = as_array(rendered_set(VERIFICATION_IMAGES, VERIFICATION_SEED))
    difference = verify(network, model_file, images)
    print(f"{model_file}: {model_file.stat().st_size / 1e6:.2f} MB, differs by {difference:.1g}")

    runtime = session(model_file)
    figures = measure_model(lambda bgr: infer(runtime, bgr), material)
    run = Run(
        steps=state["step"],
        batch=state["batch"],
        minutes=state["elapsed_s"] / 60.0,
        seed=state["seed"],
        rate=state.get("rate", options.rate),
        material=material,
        began_with=began_with(state),
        kept=options.keep,
        device=state.get("device", "the CPU"),
        earlier=learnt_from(state),
        network=network,
        model_file=model_file,
        latency_ms=latency_ms(model_file, LATENCY_THREADS),
        difference=difference,
    )
    draw_curves(options.out / "curves.png", state.get("curve", []), LOSSES)
    card = options.out / "MODEL_CARD.md"
    write_card(card, run, figures, options.notes.read_text() if options.notes else "")
    print(card.read_text())
    if options.overlays:
        count = write_overlays(
            options.overlays, material, lambda bgr: infer(runtime, bgr), figures.threshold
        )
        print(f"{options.overlays}: {count} pictures")


if __name__ == "__main__":
    main()
