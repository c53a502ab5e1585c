"""The model card: measured figures put into `model_card.md.in`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import torch
from torch import nn

from lane_training.evaluate import (
    Found,
    Infer,
    Measured,
    choose_threshold,
    examine_labelled,
    examine_rendered,
    find_lines,
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
from lane_training.samples import HUMAN_SHARE, TAUGHT_SHARE, camera_set, rendered_set

if TYPE_CHECKING:
    from lane_training.material import Material

TEMPLATE = Path(__file__).with_name("model_card.md.in")
# What the shares of `samples.py` come to where there is no such material.
_RENDERED = (
    "| {share} % | roads drawn by `edge_server/tools/road/renderer.py`, a tenth of "
    "them without a line | exact | this repository |"
)
_LABELLED = (
    "| {share:.1f} % | {count} image{s} of `{source}`, warped: another place in the lane, another "
    "bend, another horizon{roads} | people, or networks where the labels say so | {licence} |"
)
_TAUGHT = (
    "| {share:.0f} % | 180 frames of two motorway clips and six stills, Udacity CarND (first two "
    "thirds of each clip; the stills of projects 1 and 4 were kept out) | two public networks, "
    "moved onto the paint, neighbouring lines from equal spacing | MIT |"
)
_FOLDER_TERMS = """\
The weights contain no image. They were learnt in part from frames whose redistribution terms are
unstated; whoever needs weights free of that question trains without the data folder, on rendered
roads alone."""
_OWN_TERMS = "The weights contain no image; the terms of the images they were learnt from apply."
_RENDERED_TERMS = "The weights were learnt from nothing but this repository."

UNSEEN_ROADS, UNSEEN_SEED = 200, 990_001
ROADS_TO_CHOOSE_ON = 100
RENDERED_ONLY_SEED = 770_001
# More images choose no other threshold, and take their time.
MOST_TO_CHOOSE_ON = 500


@dataclass(frozen=True)
class Figures:
    """What was measured with the exported file.

    Attributes:
        threshold: chosen on training images and on rendered roads that no figure is of.
        training, evaluation: images of which every line is labelled; None where there were none.
        found: by source, the lines of held-out images of which only some are labelled.
        camera: roads of the synthetic camera.
        rendered: roads of all kinds from seeds that training did not draw.
    """

    threshold: float
    training: Measured | None
    evaluation: Measured | None
    found: dict[str, Found]
    camera: Measured
    rendered: Measured


@dataclass(frozen=True)
class Run:
    """How the weights came about.

    Attributes:
        began_with: what the first weights were.
        kept: the share of those in the exported ones.
        device: what computed the steps.
        earlier: of each material, in turn: its identity, name and the step it was begun with.
    """

    steps: int
    batch: int
    minutes: float
    seed: int
    rate: float
    material: Material | None
    began_with: str
    kept: float
    device: str
    earlier: list[tuple[str, str, int]]
    network: LaneNetwork
    model_file: Path
    latency_ms: float
    difference: float


def measure_model(infer: Infer, material: Material | None) -> Figures:
    """Chooses the threshold, then measures everything with it."""
    unseen = examine_rendered(rendered_set(UNSEEN_ROADS, UNSEEN_SEED), infer)
    camera = examine_rendered(camera_set(UNSEEN_ROADS, UNSEEN_SEED), infer)
    if material is None:
        seen = examine_rendered(rendered_set(UNSEEN_ROADS, RENDERED_ONLY_SEED), infer)
        threshold = choose_threshold(seen)
        return Figures(
            threshold, None, None, {}, measure(camera, threshold), measure(unseen, threshold)
        )
    seen_images = [each for each in material.training if each.complete]
    training = examine_labelled(seen_images[:MOST_TO_CHOOSE_ON], infer)
    # Other roads and cameras than those of the labelled images want a threshold, too.
    other_roads = rendered_set(ROADS_TO_CHOOSE_ON, RENDERED_ONLY_SEED)
    threshold = choose_threshold([*training, *examine_rendered(other_roads, infer)])
    complete = [each for each in material.evaluation if each.complete]
    partial = [each for each in material.evaluation if not each.complete]
    evaluation = examine_labelled(complete, infer)
    return Figures(
        threshold,
        measure(training, threshold) if training else None,
        measure(evaluation, threshold) if evaluation else None,
        find_lines(examine_labelled(partial, infer), threshold),
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
        return f"| {name} | not measured: there were none | | | | |"
    score = measured.score
    spread = measured.accuracy_interval, measured.f1_interval
    accuracy, f1 = (f"{low:.3f}-{high:.3f}" for low, high in spread)
    return (
        f"| {name} | {measured.images} | {score.accuracy:.4f} ({accuracy}) "
        f"| {score.f1:.4f} ({f1}) | {score.false_positive:.3f} | {score.false_negative:.3f} |"
    )


def write_card(path: Path, run: Run, figures: Figures, notes: str = "") -> None:
    """Writes the card beside the model's configuration: what this run is, and nothing of another.

    Args:
        notes: what people have found out about these very weights; Markdown, put at the end.
    """
    parameters = sum(p.numel() for p in run.network.parameters())
    trained, measured = run.material.names() if run.material else ("labelled images",) * 2
    rows = (
        _row(f"{measured}, never trained on", figures.evaluation),
        _row("rendered roads of the synthetic camera", figures.camera),
        _row("rendered roads of all kinds, unseen seeds", figures.rendered),
        _row(f"{trained}, trained on", figures.training),
    )
    materials, terms = _materials(run.material)
    values = {
        "parameters": f"{parameters / 1e6:.2f}",
        "gmacs": f"{multiply_accumulates(run.network) / 1e9:.2f}",
        "megabytes": f"{run.model_file.stat().st_size / 1e6:.1f}",
        "steps": str(run.steps),
        "batch": str(run.batch),
        "images": f"{run.steps * run.batch:,}",
        "minutes": f"{run.minutes:.0f}",
        "seed": str(run.seed),
        "rate": f"{run.rate:.1e}",
        "began_with": run.began_with,
        "device": run.device,
        "earlier": _earlier(run),
        "found": _found(figures.found),
        "threshold": f"{figures.threshold:g}",
        "rows": "\n".join(rows),
        "materials": materials,
        "terms": terms,
        "chosen_on": "the images trained on and " * bool(run.material) + "other rendered roads",
        "latency_ms": f"{run.latency_ms:.1f}",
        "difference": f"{run.difference:.1g}",
    }
    card = Template(TEMPLATE.read_text()).substitute(values)
    path.write_text(card + (f"\n{notes.strip()}\n" if notes else ""))


def _found(found: dict[str, Found]) -> str:
    """A table of the sources of which only some lines are labelled, or nothing."""
    if not found:
        return ""
    rows = [
        f"| {source} | {each.images} | {each.lines} "
        f"| {each.share:.3f} ({each.interval[0]:.3f}-{each.interval[1]:.3f}) |"
        for source, each in found.items()
    ]
    return "\n".join(
        (
            "",
            "Of held-out images in which people labelled only the lines of the vehicle's own lane: "
            "share of these",
            "lines that are found (within TuSimple's threshold on 85 % of the labelled rows).",
            "",
            "| source | images | lines | found |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


def _materials(material: Material | None) -> tuple[str, str]:
    """The table's rows, and the terms of the weights."""
    if material is None:
        return _RENDERED.format(share=100), _RENDERED_TERMS
    rows = [
        _LABELLED.format(
            share=100 * HUMAN_SHARE * group.share,
            count=len(group.images),
            s="" if len(group.images) == 1 else "s",
            source=group.source,
            roads=", or row by row onto another labelled road" if group.images.complete else "",
            licence="not part of this repository"
            if material.folder
            else "whoever trained it knows",
        )
        for group in material.groups()
    ]
    rest = 1.0 - HUMAN_SHARE
    if material.folder is not None:
        rows.append(_TAUGHT.format(share=100 * TAUGHT_SHARE))
        rest -= TAUGHT_SHARE
    rows.append(_RENDERED.format(share=round(100 * rest)))
    return "\n".join(rows), _OWN_TERMS if material.folder is None else _FOLDER_TERMS


def _earlier(run: Run) -> str:
    """What the weights learnt from before this material, and what was kept of the first ones."""
    lines = [
        f"Steps {step} to {following} learnt from other material: {name}."
        for (_, name, step), (_, _, following) in itertools.pairwise(run.earlier)
    ]
    if run.kept:
        lines.append(
            f"Of the exported weights {100 * run.kept:g} % are those that the run began with, the "
            "rest the last average."
        )
    return "".join(f"{line}\n" for line in lines)
