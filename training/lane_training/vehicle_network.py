"""The example network for vehicles and the drivable area: training, export and figures."""

from __future__ import annotations

import copy
import math
import multiprocessing
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
import onnx
import torch
from google.protobuf import text_format
from torch import Tensor, nn
from torch.nn import functional
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.contracts import Contract
from edge_server.pipeline.perception import Detections, NetworkView, Segmentation
from edge_server.pixels import CropRegion
from edge_server.tools.road.scene import RoadScene
from lane_training.export import load_exported, session
from lane_training.network import TRUNK_CHANNELS, LaneNetwork, ResidualBlock, StripContext
from lane_training.roads import LONGEST_DRIVE_M, render_road, road_in, sample_road
from lane_training.trainer import keep_freed_memory, settle
from lane_training.vehicles import CELL_PX, INPUT_PX, LABELS, RoadSample, level, sample, truth_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from lane_training.vehicles import RoadTruth

STRIDE_PX = 8
COLUMNS, ROWS = INPUT_PX[0] // STRIDE_PX, INPUT_PX[1] // STRIDE_PX
CHANNELS, HEAD = 72, 48
BATCH, RATE, WEIGHT_DECAY = 16, 2e-3, 0.02
SETTLING_IMAGES = 64
AVERAGE_DECAY, WARM_UP_STEPS = 0.998, 100
SAVE_EVERY_S = 30.0
OPSET = 13
# Roads of these seeds are measured on, and of lower ones trained on.
MEASURED_SEED = 10_000_000
PICTURE_PX = 1280, 720
IOU = 0.5
MEASURED = "synthetic://", "every condition", "night", "rain", "bend"


class VehicleNetwork(nn.Module):
    """Image in; boxes as of YOLOv8, and scores of the drivable area, out.

    Input:  (B, 3, 192, 320) float32, NCHW, BGR, 0..1.
    Output: boxes (B, 6, 960): centre and size in px of the input, and the score of each class;
        area (B, 2, 48, 80): of background and drivable.
    """

    cells: Tensor

    def __init__(self) -> None:
        super().__init__()
        first, second, *_ = TRUNK_CHANNELS
        # As the lane network begins; this part stays as it is there.
        self.stride_4 = nn.Sequential(
            nn.Conv2d(3, first, 7, 4, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(inplace=True),
            ResidualBlock(first, first, 1),
        )
        self.stride_8 = nn.Sequential(
            ResidualBlock(first, second, 2), ResidualBlock(second, second, 1)
        )
        self.stride_16 = nn.Sequential(
            ResidualBlock(second, CHANNELS, 2),
            StripContext(CHANNELS),
            nn.ConvTranspose2d(CHANNELS, HEAD, 2, 2, bias=False),
        )
        self.lateral = nn.Conv2d(second, HEAD, 1, bias=False)
        self.fuse = nn.Sequential(nn.BatchNorm2d(HEAD), nn.ReLU(), ResidualBlock(HEAD, HEAD, 1))
        self.of_boxes = nn.Sequential(
            nn.Conv2d(HEAD, HEAD, 3, 1, 1, bias=False), nn.BatchNorm2d(HEAD), nn.ReLU(inplace=True)
        )
        self.box = nn.Conv2d(HEAD, 4 + len(LABELS), 1)
        self.area = nn.Sequential(nn.Conv2d(HEAD, 2 * (STRIDE_PX // CELL_PX) ** 2, 1))
        self.area.append(nn.PixelShuffle(STRIDE_PX // CELL_PX))
        with torch.no_grad():
            self.box.bias[4:] = -4.5  # a cell in a hundred has a vehicle
        rows, columns = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
        cells = (torch.stack((columns, rows)).reshape(2, -1) + 0.5) * STRIDE_PX
        self.register_buffer("cells", cells, persistent=False)

    def early(self, image: Tensor) -> Tensor:
        """Return (B, 32, 48, 80), what the layers see that are not trained."""
        features: Tensor = self.stride_4((image - 0.4) * 4.0)
        return features

    def raw(self, early: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes (B, 6, 960) whose last rows are logits, and the area's logits."""
        fine = self.stride_8(early)
        features = self.fuse(self.lateral(fine) + self.stride_16(fine))
        raw = self.box(self.of_boxes(features)).flatten(2).float()
        centres = self.cells + STRIDE_PX * raw[:, :2]
        sizes = STRIDE_PX * torch.exp(raw[:, 2:4].clamp(-4.0, 4.0))
        return torch.cat((centres, sizes, raw[:, 4:]), 1), self.area(features).float()

    def begin_with(self, file: Path, images: Tensor) -> None:
        """Take the first layers of a lane network that was exported to `file`; `images` settle
        its normalisation."""
        lanes = LaneNetwork()
        settle(lanes, load_exported(lanes, file), images)
        theirs = *lanes.stem, *lanes.stride_16
        for layer, one in zip((*self.stride_4, *self.stride_8), theirs, strict=False):
            layer.load_state_dict(one.state_dict())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        boxes, area = self.raw(self.early(image))
        return torch.cat((boxes[:, :4], torch.sigmoid(boxes[:, 4:])), 1), area


def draw(file: Path, count: int, processes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return so many `RoadSample`s, drawn now if `file` has none: pictures (N, 192, 320, 3) uint8,
    boxes (N, 8, 5) float32, and maps (N, 48, 80) bool."""
    if not file.exists():
        drawn: list[RoadSample] = []
        with multiprocessing.get_context("spawn").Pool(processes, cv2.setNumThreads, (1,)) as pool:
            for each in pool.imap(sample, range(count), chunksize=16):
                drawn.append(each)
                if len(drawn) % 500 == 0:
                    print(f"{len(drawn)} of {count} roads are drawn", flush=True)
        beside = file.with_suffix(".new.npz")
        np.savez(beside, *(np.stack(part) for part in zip(*drawn, strict=True)))
        beside.replace(file)
    with np.load(file) as arrays:
        images, boxes, maps = (torch.from_numpy(arrays[f"arr_{n}"]) for n in range(3))
    return images, boxes, maps


def corners_of(boxes: Tensor) -> Tensor:
    """Return x_min, y_min, x_max, y_max of centres and sizes, in the second last dimension."""
    half = boxes[..., 2:4, :] / 2
    return torch.cat((boxes[..., :2, :] - half, boxes[..., :2, :] + half), -2)


def iou_and_giou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both of pairs of boxes, corners (N, 4)."""
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    either = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - both
    hull = torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])
    iou, around = both / either, hull.prod(1)
    return iou, iou - (around - either) / around


def loss_of(
    boxes: Tensor, area: Tensor, truth: Tensor, drivable: Tensor, cells: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of raw outputs, and its parts.

    A cell finds the vehicle whose middle is nearest to it, within a cell's width; cells beside
    that in the same vehicle, and in one that is hardly seen, learn nothing of boxes. The wanted
    score is the overlap of the box with the truth, as in VarifocalNet.
    """
    low, high = truth[..., :2], truth[..., 2:4]
    away = (cells.T[None, :, None] - ((low + high) / 2)[:, None]).abs()  # (B, cells, vehicles, 2)
    classes, sides = truth[..., 4], (high - low)[:, None]
    within = (away <= torch.maximum(0.12 * sides, torch.tensor(STRIDE_PX - 1.0))).all(-1)
    near = (away / sides.clamp(min=1e-3)).amax(-1)
    near = near.masked_fill(~(within & (classes[:, None] >= 0)), math.inf)
    distance, which = near.min(-1)
    found = distance < math.inf
    # The whole of a vehicle that is hardly seen, the middle of others.
    beside = (away <= torch.where(classes == -1, 0.5, 0.3)[:, None, :, None] * sides).all(-1)
    ignored = ~found & (beside & (classes[:, None] >= -1)).any(-1)

    image, cell = found.nonzero(as_tuple=True)
    wanted = truth[image, which[image, cell]]
    given = corners_of(boxes[image, :4, cell].unsqueeze(-1)).squeeze(-1)
    iou, giou = iou_and_giou(given, wanted[:, :4])
    logits = boxes[:, 4:].transpose(1, 2)
    target = torch.zeros_like(logits)
    target[image, cell, wanted[:, 4].long()] = iou.detach().clamp(0.05, 1.0)
    weight = torch.where(target > 0, target, 0.75 * torch.sigmoid(logits.detach()) ** 2)
    weight = weight * ~ignored[..., None]
    scores = functional.binary_cross_entropy_with_logits(logits, target, weight, reduction="sum")
    count = max(len(image), 1)
    parts = {
        "box": (1 - giou).sum() / count,
        "score": scores / count,
        "area": functional.cross_entropy(area, drivable.long()),
    }
    loss = 2.0 * parts["box"] + parts["score"] + parts["area"]
    return loss, {name: part.item() for name, part in parts.items()}


def train(
    roads: tuple[Tensor, Tensor, Tensor],
    checkpoint: Path,
    minutes: float,
    threads: int,
    lanes: Path,
) -> None:
    """Train for so many minutes in all, over restarts; `checkpoint` has the network's average, and
    `lanes` is the exported lane network whose first layers it begins with."""
    torch.set_num_threads(threads)
    torch.manual_seed(7)
    keep_freed_memory()
    images, boxes, maps = roads
    network = VehicleNetwork()
    network.begin_with(lanes, _planes(images[:SETTLING_IMAGES]))
    network.to(memory_format=torch.channels_last)
    network.train()
    network.stride_4.requires_grad_(False).eval()
    early = _early(network, images)
    average = copy.deepcopy(network).requires_grad_(False).eval()
    learnt = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learnt if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in learnt if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=RATE)
    step, elapsed_s = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        average.load_state_dict(state["average"])
        optimiser.load_state_dict(state["optimiser"])
        step, elapsed_s = state["step"], state["elapsed_s"]
    rng = np.random.default_rng(step)
    saved_s = elapsed_s
    while elapsed_s < 60 * minutes:
        began_s = time.monotonic()
        cosine = 0.5 * (1 + math.cos(math.pi * elapsed_s / (60 * minutes)))
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (0.02 + 0.98 * cosine)
        seen, truth, drivable = _batch(early, boxes, maps, rng)
        with torch.autocast("cpu", torch.bfloat16):
            found, area = network.raw(seen)
        loss, parts = loss_of(found, area, truth, drivable, network.cells)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimiser.step()
        step += 1
        with torch.no_grad():
            kept = min(AVERAGE_DECAY, step / (9 + step))
            for mine, theirs in zip(
                average.state_dict().values(), network.state_dict().values(), strict=True
            ):
                mine.lerp_(theirs, 1 - kept) if mine.is_floating_point() else mine.copy_(theirs)
        elapsed_s += time.monotonic() - began_s
        if elapsed_s - saved_s > SAVE_EVERY_S or elapsed_s >= 60 * minutes:
            saved_s = elapsed_s
            shown = ", ".join(f"{name} {part:.3f}" for name, part in parts.items())
            print(f"step {step}, {elapsed_s / 60:.1f} min: {shown}", flush=True)
            state = {
                "network": network.state_dict(),
                "average": average.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step,
                "elapsed_s": elapsed_s,
            }
            beside = checkpoint.with_suffix(".new")
            torch.save(state, beside)
            beside.replace(checkpoint)


def _planes(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).to(torch.bfloat16).div_(255.0)


def _early(network: VehicleNetwork, images: Tensor) -> Tensor:
    """Return (2, N, 32, 48, 80) bfloat16: of the pictures, and of the mirrored ones."""
    early = torch.empty(2, len(images), TRUNK_CHANNELS[0], 48, 80, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for first in range(0, len(images), 32):
            some = _planes(images[first : first + 32])
            for side, seen in enumerate((some, some.flip(3))):
                early[side, first : first + 32] = network.early(seen)
    return early


def _batch(
    early: Tensor, boxes: Tensor, maps: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random batch, half of it mirrored."""
    slots = torch.from_numpy(rng.integers(0, len(boxes), BATCH))
    side = torch.from_numpy(rng.integers(0, 2, BATCH))
    truth, drivable, mirrored = boxes[slots], maps[slots], side > 0
    drivable[mirrored] = drivable[mirrored].flip(2)
    truth[mirrored] = truth[mirrored][..., [2, 1, 0, 3, 4]] * torch.tensor([-1.0, 1, -1, 1, 1])
    truth[mirrored] += torch.tensor([1.0, 0, 1, 0, 0]) * INPUT_PX[0]
    return early[side, slots], truth, drivable


def export(checkpoint: Path, file: Path) -> None:
    """Write the average as an ONNX file, and compare it with PyTorch.

    Raises:
        RuntimeError: the file gives something else.
    """
    network = VehicleNetwork().eval()
    network.load_state_dict(torch.load(checkpoint, weights_only=True)["average"])
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    image = torch.rand(1, 3, INPUT_PX[1], INPUT_PX[0])
    torch.onnx.export(
        network,
        (image,),
        str(beside),
        input_names=["input"],
        output_names=["boxes", "area"],
        opset_version=OPSET,
        dynamo=False,
    )
    model = onnx.load(str(beside))
    onnx.checker.check_model(model, full_check=True)
    model.producer_name, model.producer_version, model.doc_string = "edge_server", "", ""
    onnx.save(model, str(beside))
    beside.replace(file)
    with torch.no_grad():
        expected = [each.numpy() for each in network(image)]
    given = session(file).run(["boxes", "area"], {"input": image.numpy()})
    for name, wanted, got in zip(("boxes", "area"), expected, given, strict=True):
        if (difference := float(np.abs(wanted - got).max())) > 1e-2:
            raise RuntimeError(f"{file}: '{name}' differs from PyTorch by {difference:.3g}")
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


def measured_roads(kind: str, count: int) -> list[tuple[RoadScene, float]]:
    """Return roads that are not trained on, and how far along: of the rendered camera, of all
    conditions, or of one."""
    roads = []
    for number in range(count):
        rng = np.random.default_rng(MEASURED_SEED + number)
        if kind == "synthetic://":
            scene = RoadScene.for_camera(int(rng.integers(1 << 31)))
        else:
            every = kind == "every condition"
            scene = level(sample_road(rng) if every else road_in((kind,), rng))
        roads.append((scene, rng.uniform(0, LONGEST_DRIVE_M)))
    return roads


def measure(repository: Path, count: int) -> str:
    """Return a Markdown table: of each kind of road the average precision of each class at an
    overlap of 0.5, how many of the vehicles are found at the threshold of the configuration, how
    many boxes there are beside them, and the overlap of the drivable area.

    Pictures have 1280 x 720 px and become the input as `image_preprocess` makes it; a daemon's own
    contracts read the outputs.
    """
    runtime = session(repository / "road_objects" / "1" / "model.onnx")
    vehicles = _config(repository / "vehicles", LABELS)
    threshold = float(vehicles.parameters["score_threshold"])
    all_boxes = {**vehicles.parameters, "score_threshold": "0.02"}
    detection = Contract.of(replace(vehicles, parameters=all_boxes))
    segmentation = Contract.of(_config(repository / "drivable_area", ("background", "drivable")))
    view = NetworkView(PICTURE_PX, CropRegion(0, 0, *PICTURE_PX), INPUT_PX)
    lines = [
        f"| {count} roads each | AP of cars | AP of lorries | found | beside | drivable area |",
        "|---|---|---|---|---|---|",
    ]
    for kind in MEASURED:
        matches, counts = [], np.zeros(len(LABELS))
        both = either = 0
        for scene, distance_m in measured_roads(kind, count):
            picture, _ = render_road(scene, distance_m, *PICTURE_PX)
            truth = truth_of(scene, distance_m, *PICTURE_PX)
            planes = cv2.resize(picture, INPUT_PX).transpose(2, 0, 1)[None].astype(np.float32)
            boxes, area = runtime.run(["boxes", "area"], {"input": planes / np.float32(255)})
            found = detection.result({"boxes": boxes}, view)
            mask = segmentation.result({"area": area}, view)
            assert isinstance(found, Detections)
            assert isinstance(mask, Segmentation)
            matches.append(matched(found, truth))
            counts += [np.count_nonzero(truth.classes == each) for each in range(len(LABELS))]
            cells = np.repeat(mask.run_classes, mask.run_lengths).reshape(mask.size[::-1])
            scale = PICTURE_PX[1] // cells.shape[0], PICTURE_PX[0] // cells.shape[1]
            drivable = np.kron(cells, np.ones(scale, np.int64)) > 0
            both += np.count_nonzero(drivable & truth.drivable)
            either += np.count_nonzero(drivable | truth.drivable)
        scores, classes, hits = (np.concatenate(part) for part in zip(*matches, strict=True))
        precision = [
            average_precision(scores[classes == c], hits[classes == c], counts[c])
            for c in range(len(LABELS))
        ]
        sure = scores >= threshold
        share, beside = hits[sure].sum() / counts.sum(), (~hits[sure]).sum() / counts.sum()
        figures = *precision, share, beside, both / either
        lines.append(f"| {kind} | {' | '.join(f'{each:.3f}' for each in figures)} |")
    return "\n".join(lines)


def _config(folder: Path, labels: tuple[str, ...]) -> ModelConfig:
    text = (folder / "config.pbtxt").read_text()
    config = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    return replace(config, labels={config.outputs[0].name: labels})


def matched(
    found: Detections, truth: RoadTruth
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return scores, classes, and whether each box is one of a vehicle of its class that no better
    box has; without those of vehicles that are hardly seen."""
    free = truth.classes.copy()
    kept, hits = [], []
    for number, (box, label) in enumerate(zip(found.boxes, found.classes, strict=True)):
        low = np.maximum(box[:2], truth.boxes[:, :2])
        both = np.clip(np.minimum(box[2:], truth.boxes[:, 2:]) - low, 0, None).prod(axis=1)
        sizes = (truth.boxes[:, 2:] - truth.boxes[:, :2]).prod(axis=1)
        overlap = both / (sizes + (box[2:] - box[:2]).prod() - both)
        own = np.where(free == label, overlap, 0.0)
        hit = len(own) > 0 and own.max() >= IOU
        if hit:
            free[own.argmax()] = -2
        # A box on a vehicle that is hardly seen is neither right nor wrong.
        elif (both[truth.classes == -1] > 0.5 * (box[2:] - box[:2]).prod()).any():
            continue
        kept.append(number)
        hits.append(hit)
    return found.scores[kept], found.classes[kept], np.array(hits, bool)


def average_precision(scores: NDArray[np.float64], hits: NDArray[np.bool_], count: float) -> float:
    """Return the area under the precision by recall, at its highest from each recall on."""
    right = np.cumsum(hits[np.argsort(-scores)])
    precision = right / np.arange(1, len(right) + 1)
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    return float((np.diff(right, prepend=0) * highest).sum() / max(count, 1))
