"""The model card: measured figures put into `model_card.md.in`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
from torch import nn

from lane_training import frames
from lane_training.evaluate import (
    Infer,
    Measured,
    choose_threshold,
    examine_human,
    examine_rendered,
    measure,
)
from lane_training.export import INPUT_SHAPE
from lane_training.network import (
    FUSED_CHANNELS,
    HIDDEN,
    POOLED_COLUMNS,
    POOLED_ROWS,
    LaneNetwork,
)
from lane_training.samples import camera_set, rendered_set

TEMPLATE = Path(__file__).with_name("model_card.md.in")
MATERIALS = """\
| 52 % | 84 motorway frames (0-83 of 110), warped: another place in the lane, another bend, \
another horizon, or bent row by row onto one of 6,221 other labelled road geometries | people \
(TuSimple form) | redistribution terms unstated; not part of this repository |
| 15 % | 180 frames of two motorway clips and six stills, Udacity CarND (first two thirds of each \
clip; the stills of projects 1 and 4 were kept out) | two public networks, repaired: straight to \
the vanishing point, neighbouring lines from equal spacing | MIT |
| 33 % | roads drawn by `edge_server/cameras/road_renderer.py`, a tenth of them without a line | \
exact | this repository |"""
TERMS = """\
The weights contain no image. They were learnt in part from frames whose redistribution terms are
unstated; whoever needs weights free of that question trains without the data folder, on rendered
roads alone."""
RENDERED_MATERIALS = """\
| 100 % | roads drawn by `edge_server/cameras/road_renderer.py`, a tenth of them without a line | \
exact | this repository |"""
RENDERED_TERMS = "The weights were learnt from nothing but this repository."

UNSEEN_ROADS, UNSEEN_SEED = 200, 990_001
RENDERED_ONLY_SEED = 770_001


@dataclass(frozen=True)
class Figures:
    """What was measured with the exported file.

    Attributes:
        threshold: chosen on training material alone.
        training, evaluation: human-labelled frames; None without the data.
        camera: roads of the synthetic camera.
        rendered: roads of all kinds from seeds that training did not draw.
    """

    threshold: float
    training: Measured | None
    evaluation: Measured | None
    camera: Measured
    rendered: Measured


@dataclass(frozen=True)
class Run:
    """How the weights came about."""

    steps: int
    batch: int
    minutes: float
    seed: int
    network: LaneNetwork
    model_file: Path
    latency_ms: float
    difference: float


def measure_model(infer: Infer, data: Path | None) -> Figures:
    """Chooses the threshold on training frames, then measures everything with it."""
    unseen = examine_rendered(rendered_set(UNSEEN_ROADS, UNSEEN_SEED), infer)
    camera = examine_rendered(camera_set(UNSEEN_ROADS, UNSEEN_SEED), infer)
    if data is None:
        seen = examine_rendered(rendered_set(UNSEEN_ROADS, RENDERED_ONLY_SEED), infer)
        threshold = choose_threshold(seen)
        return Figures(
            threshold, None, None, measure(camera, threshold), measure(unseen, threshold)
        )
    training = examine_human(data, frames.TRAINING_FRAMES, infer)
    threshold = choose_threshold(training)
    evaluation = examine_human(data, frames.EVALUATION_FRAMES, infer)
    return Figures(
        threshold,
        measure(training, threshold),
        measure(evaluation, threshold),
        measure(camera, threshold),
        measure(unseen, threshold),
    )


def multiply_accumulates(network: LaneNetwork) -> int:
    """MACs of one image: all convolutions, and the products of the head."""
    counted = 0

    def count(module: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal counted
        assert isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
        if isinstance(module, nn.ConvTranspose2d):
            counted += module.weight.numel() * output[0, 0].numel() // 2
        else:
            counted += module.weight[0].numel() * output[0].numel()

    hooks = [
        module.register_forward_hook(count)
        for module in network.modules()
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
    ]
    with torch.no_grad():
        network.eval()(torch.zeros(INPUT_SHAPE))
    for hook in hooks:
        hook.remove()
    anchors = len(network.interpolation)
    cells = POOLED_ROWS * POOLED_COLUMNS
    counted += cells * FUSED_CHANNELS * HIDDEN + anchors * cells * HIDDEN
    return counted + anchors * HIDDEN * network.predict.out_features


def _row(name: str, measured: Measured | None) -> str:
    if measured is None:
        return f"| {name} | not measured: the data was absent | | | | |"
    score = measured.score
    spread = measured.accuracy_interval, measured.f1_interval
    accuracy, f1 = (f"{low:.3f}-{high:.3f}" for low, high in spread)
    return (
        f"| {name} | {measured.images} | {score.accuracy:.4f} ({accuracy}) "
        f"| {score.f1:.4f} ({f1}) | {score.false_positive:.3f} | {score.false_negative:.3f} |"
    )


def write_card(path: Path, run: Run, figures: Figures) -> None:
    """Writes the card beside the model's configuration."""
    parameters = sum(p.numel() for p in run.network.parameters())
    rows = (
        _row("human labels, frames 88-109, never trained on", figures.evaluation),
        _row("rendered roads of the synthetic camera", figures.camera),
        _row("rendered roads of all kinds, unseen seeds", figures.rendered),
        _row("human labels, frames 0-83, trained on", figures.training),
    )
    values = {
        "parameters": f"{parameters / 1e6:.2f}",
        "gmacs": f"{multiply_accumulates(run.network) / 1e9:.2f}",
        "megabytes": f"{run.model_file.stat().st_size / 1e6:.1f}",
        "steps": str(run.steps),
        "batch": str(run.batch),
        "images": f"{run.steps * run.batch / 1000:.0f}",
        "minutes": f"{run.minutes:.0f}",
        "seed": str(run.seed),
        "threshold": f"{figures.threshold:g}",
        "rows": "\n".join(rows),
        "materials": MATERIALS if figures.training else RENDERED_MATERIALS,
        "terms": TERMS if figures.training else RENDERED_TERMS,
        "chosen_on": "frames 0-83" if figures.training else "other rendered roads",
        "latency_ms": f"{run.latency_ms:.1f}",
        "difference": f"{run.difference:.1g}",
    }
    path.write_text(Template(TEMPLATE.read_text()).substitute(values))
