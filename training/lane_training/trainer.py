"""The training run: a cosine schedule that survives being stopped."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from lane_training.anchors import lane_anchors
from lane_training.export import load_exported
from lane_training.loss import lane_loss
from lane_training.material import Material, MaterialError, identity_of, name_of
from lane_training.network import LaneNetwork
from lane_training.ranks import Ranks, together
from lane_training.samples import CPU, Loaders, SampleRing

if TYPE_CHECKING:
    from pathlib import Path

WARM_UP_STEPS = 150
FINAL_RATE_SHARE = 0.02
WEIGHT_DECAY = 0.02
AVERAGE_DECAY = 0.998
CLIP_NORM = 20.0
SETTLING_IMAGES = 64
CURVE_EVERY_STEPS = 50
LOSSES = ("class", "offset", "length")
SHOW_EVERY_STEPS = 10
LOSS_SHARE = 0.02
# Of malloc.h: never trim, never map, one arena for all threads.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
MALLOPT = {M_TRIM_THRESHOLD: -1, M_TOP_PAD: 256 << 20, M_MMAP_MAX: 0, M_ARENA_MAX: 1}
ALONE = Ranks(CPU)
BAR = "{percentage:3.0f}% |{bar}| {postfix}"


@dataclass(frozen=True)
class Plan:
    """What a run is asked to do.

    Attributes:
        minutes: of training in all, over restarts; the learning rate follows it.
        steps: ends the run after this many instead, so that it can be repeated exactly in
            length; None to go by minutes.
        batch: images per step.
        rate: highest learning rate.
        seed: of weights and samples.
        checkpoint: file that the run resumes from and writes to.
        material: labelled images; None to train on rendered roads alone.
        other_material: go on from a checkpoint whose run learnt from something else.
        begin_with: an exported model whose weights are the first ones; None for random ones.
        late_layers: learn with these alone, from stride 32 on; the others, and every normalisation,
            stay as they are.
        device: what is computed on, `cpu`, `cuda` or `cuda:1`.
        loaders: processes that make the images, of each trainer.
        save_every_s: of training, between two checkpoints.
    """

    minutes: float
    steps: int | None
    batch: int
    rate: float
    seed: int
    checkpoint: Path
    material: Material | None
    other_material: bool = False
    begin_with: Path | None = None
    late_layers: bool = False
    device: str = "cpu"
    loaders: int = 1
    save_every_s: float = 120.0

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the run that is done; 1 or more ends it."""
        if self.steps is not None:
            return step / self.steps
        return elapsed_s / (60.0 * self.minutes)


def learnt_from(state: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Of a checkpoint: identity and name of each material, and the step it was begun with."""
    unknown = [("unknown", "material that the checkpoint does not tell", 0)]
    return [tuple(each) for each in state.get("learnt_from", unknown)]


def read_checkpoint(plan: Plan) -> dict[str, Any]:
    """The plan's checkpoint.

    Raises:
        MaterialError: its run learnt from something else, and that is not what is meant.
    """
    state: dict[str, Any] = torch.load(plan.checkpoint, map_location="cpu", weights_only=True)
    identity, name, _ = learnt_from(state)[-1]
    if identity != identity_of(plan.material) and not plan.other_material:
        raise MaterialError(
            f"{plan.checkpoint}: is of a run that learnt from {name}, and this one is to learn "
            f"from {name_of(plan.material)}; give another --checkpoint to begin anew, the same "
            "material to go on, or --other-material to go on with this one"
        )
    return state


def device_name(ranks: Ranks) -> str:
    """For a person, what a run computes on."""
    cuda = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if cuda else "the CPU"
    return name if ranks.world == 1 else f"{name}, {ranks.world} processes"


def began_with(state: dict[str, Any]) -> str:
    """What a checkpoint's first weights were."""
    return str(state.get("began_with", "random weights"))


def settle(network: LaneNetwork, norms: list[str], images: torch.Tensor) -> None:
    """Gives normalisation layers that pass everything through the statistics of `images`.

    The network answers as before, and in training, where the layers take out each batch's own mean
    and variance, nearly so.
    """
    layers = [layer for name, layer in network.named_modules() if name in norms]
    seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].float()
        seen[layer] = x.mean((0, 2, 3)), x.var((0, 2, 3))

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    network.eval()
    with torch.no_grad():
        network.features(images.float())
        for layer in layers:
            assert isinstance(layer, nn.BatchNorm2d)
            mean, variance = seen[layer]
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
            layer.weight.copy_((variance + layer.eps).sqrt())
            layer.bias.add_(mean)
    for hook in hooks:
        hook.remove()
    network.train()


class Average:
    """Exponential moving average of a network's weights: what is measured and exported."""

    def __init__(self, network: LaneNetwork, device: torch.device = CPU) -> None:
        self.network = LaneNetwork()
        self.network.load_state_dict(network.state_dict())
        self.network.requires_grad_(False).eval().to(device)

    def update(self, network: nn.Module, step: int) -> None:
        """Moves towards the network, faster in the first steps."""
        decay = min(AVERAGE_DECAY, (1 + step) / (10 + step))
        averages, current = self.network.state_dict(), network.state_dict()
        moving = [name for name, mine in averages.items() if mine.is_floating_point()]
        mine, theirs = ([state[name] for name in moving] for state in (averages, current))
        torch._foreach_lerp_(mine, theirs, 1.0 - decay)
        for name in averages.keys() - moving:
            averages[name].copy_(current[name])


class Raw(nn.Module):
    """A network up to its raw predictions, (B, 2784, 75): what a training step computes."""

    def __init__(self, network: LaneNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            raw = self.network.head(self.network.features(images))
        return raw.float()


def _optimiser(network: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW without decay on biases and normalisation."""
    learnt = [p for p in network.parameters() if p.requires_grad]
    decayed = [p for p in learnt if p.ndim > 1]
    free = [p for p in learnt if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, fused=all(p.is_cuda for p in learnt))


def _hold_early_layers(network: LaneNetwork) -> None:
    """Has a network learn in its late layers alone, and with no batch's own mean and variance."""
    for early in (network.stem, network.stride_16):
        early.requires_grad_(False)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()


def learning_rate(plan: Plan, step: int, progress: float) -> float:
    """Linear warm-up over steps, then a cosine over the share of the run that is done, 0..1."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    share = FINAL_RATE_SHARE + (1.0 - FINAL_RATE_SHARE) * cosine
    return plan.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * share


class Training:
    """Everything that changes during a run, and nothing else; this is what a checkpoint holds."""

    def __init__(self, plan: Plan, ranks: Ranks = ALONE) -> None:
        """Starts afresh, or where the plan's checkpoint left off."""
        torch.manual_seed(plan.seed)
        self._plan, self._ranks, device = plan, ranks, ranks.device
        self._anchors = torch.from_numpy(lane_anchors()).to(device)
        self._network = LaneNetwork()
        self.step, self.elapsed_s = 0, 0.0
        self.curve: list[tuple[float, ...]] = []
        self._learnt_from = [(identity_of(plan.material), name_of(plan.material), 0)]
        self._unsettled: list[str] = []
        self._began = "random weights"
        state = read_checkpoint(plan) if plan.checkpoint.exists() else None
        if state is not None:
            self._network.load_state_dict(state["network"])
        elif plan.begin_with is not None:
            self._began = f"the weights of {plan.begin_with.parent.parent.name}"
            norms = load_exported(self._network, plan.begin_with)
            self._unsettled = [] if plan.late_layers else norms
        self._average = Average(self._network, device)
        self._network.to(device, memory_format=torch.channels_last)
        self._network.train()
        if plan.late_layers:
            _hold_early_layers(self._network)
        self._optimiser = _optimiser(self._network, plan.rate)
        if state is not None:
            self._began = began_with(state)
            self._average.network.load_state_dict(state["average"])
            self._optimiser.load_state_dict(state["optimiser"])
            self.step, self.elapsed_s = state["step"], state["elapsed_s"]
            self.curve = [tuple(point) for point in state.get("curve", ())]
            before = learnt_from(state)
            if before[-1][0] == self._learnt_from[0][0]:
                self._learnt_from = before
            else:
                self._learnt_from = [*before, (*self._learnt_from[0][:2], self.step)]
        self._raw: nn.Module | None = None

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        return self._plan.progress(self.step, self.elapsed_s)

    def state(self) -> dict[str, Any]:
        """A checkpoint; `average` is the network to measure and export."""
        return {
            "network": self._network.state_dict(),
            "average": self._average.network.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "batch": self._plan.batch,
            "seed": self._plan.seed,
            "rate": self._plan.rate,
            "curve": self.curve,
            "learnt_from": self._learnt_from,
            "began_with": self._began,
            "device": device_name(self._ranks),
        }

    def note(self, losses: dict[str, float]) -> None:
        """Keeps the losses for the curves."""
        self.curve.append((self.step, *(losses.get(name, 0.0) for name in LOSSES)))

    def save(self) -> None:
        """Replaces the checkpoint in one move, so that a stop never leaves half of one."""
        path = self._plan.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        torch.save(self.state(), beside)
        beside.replace(path)

    def begin(self, ring: SampleRing) -> nn.Module:
        """What the first step needs: settled normalisation, and the other processes."""
        if self._unsettled:
            settle(self._network, self._unsettled, ring.batch(SETTLING_IMAGES)[0])
            self._average = Average(self._network, self._ranks.device)
            self._unsettled = []
        return self._ranks.wrap(Raw(self._network))

    def advance(self, ring: SampleRing) -> dict[str, torch.Tensor]:
        """One step on one batch; returns the parts of its loss, on the device."""
        began = time.monotonic()
        if self._raw is None:
            self._raw = self.begin(ring)
        images, targets = ring.batch(self._ranks.share(self._plan.batch))
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(self._plan, self.step, self.progress)
        loss, parts = lane_loss(self._raw(images), self._anchors, targets)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._network.parameters(), CLIP_NORM)
        self._optimiser.step()
        self._average.update(self._network, self.step)
        self.step += 1
        self.elapsed_s = self._ranks.agree(self.elapsed_s + time.monotonic() - began)
        return parts


def keep_freed_memory() -> None:
    """Has glibc keep what a step frees for the next one: given back to the kernel, the pages of
    tensors of megabytes take as long to come again as the step itself."""
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):
        for option, value in MALLOPT.items():
            allocator.mallopt(option, value)


def train(plan: Plan) -> dict[str, Any] | None:
    """Trains until the plan is done and returns the final checkpoint.

    Under torchrun all its processes train together, and all but the first return None.

    Raises:
        MaterialError: the device is not there, the batch cannot be shared by the processes, or see
            `read_checkpoint`.
    """
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise MaterialError(f"--device {plan.device}: PyTorch finds no GPU; give cpu")
    keep_freed_memory()
    with together(plan.device) as ranks:
        if plan.batch % ranks.world:
            raise MaterialError(f"--batch {plan.batch}: give a multiple of {ranks.world} processes")
        state = _train(plan, ranks)
    return state if ranks.rank == 0 else None


def _train(plan: Plan, ranks: Ranks) -> dict[str, Any]:
    training = Training(plan, ranks)
    if training.progress >= 1.0:
        return training.state()
    loaders = Loaders(plan.loaders, ranks.rank * plan.loaders, ranks.share(plan.batch))
    # A resumed run must not see the first run's samples again.
    ring = SampleRing(plan.material, plan.seed + training.step, loaders, ranks.device)
    losses: dict[str, torch.Tensor] = {}
    saved_s = training.elapsed_s
    interval_s = 5.0 if sys.stderr.isatty() else 60.0
    with tqdm(total=100.0, bar_format=BAR, mininterval=interval_s, disable=ranks.rank > 0) as bar:
        while training.progress < 1.0:
            for name, value in training.advance(ring).items():
                losses[name] = losses.get(name, value).lerp(value, LOSS_SHARE)
            # Reading a loss waits for the device.
            if training.step % SHOW_EVERY_STEPS == 0:
                read = {name: float(value) for name, value in losses.items()}
                shown = {name: f"{value:.3f}" for name, value in read.items()}
                bar.set_postfix(
                    step=training.step, left=time_left(training), **shown, refresh=False
                )
                if training.step % CURVE_EVERY_STEPS == 0:
                    training.note(read)
            bar.update(100.0 * training.progress - bar.n)
            if training.elapsed_s - saved_s > plan.save_every_s and ranks.rank == 0:
                training.save()
                saved_s = training.elapsed_s
    if ranks.rank == 0:
        training.save()
    return training.state()


def time_left(training: Training) -> str:
    """Hours and minutes until the run is done, at its pace so far."""
    minutes = training.elapsed_s / 60 * (1.0 / max(training.progress, 1e-6) - 1.0)
    return f"{int(minutes) // 60}:{int(minutes) % 60:02d}"
