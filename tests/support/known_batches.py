"""A few training steps on images that every process knows, alone or under torchrun.

    python known_batches.py STEPS CHECKPOINT [BEGIN_WITH]

With BEGIN_WITH only the late layers learn, without a normalisation over the batch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lane_training.loss import Targets
from lane_training.ranks import Ranks, together
from lane_training.trainer import Plan, Training

BATCH = 8


class KnownBatches:
    """In the place of `SampleRing`: upright lines on noise, to each process its part."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._seed = ranks, 0

    def batch(self, size: int) -> tuple[torch.Tensor, Targets]:
        """As `SampleRing.batch`, of this process."""
        self._seed += 1
        images = torch.rand(BATCH, 3, 360, 640, generator=torch.Generator().manual_seed(self._seed))
        lanes = torch.full((BATCH, 5, 72), float("nan"))
        for number, (image, lane) in enumerate(zip(images, lanes, strict=True)):
            x = 100 + 60 * number
            lane[0, :50] = x
            image[:, 120:, x - 4 : x + 4] += 1.0
        mine = slice(self._ranks.rank * size, (self._ranks.rank + 1) * size)
        yes = torch.ones(size, dtype=torch.bool)
        nowhere = torch.full((size, 2), float("nan"))
        weights = torch.ones(size, 5)
        return images[mine].to(torch.bfloat16), Targets(lanes[mine], weights, yes, ~yes, nowhere)


def main(steps: int, checkpoint: Path, begin_with: Path | None) -> None:
    """Train, print the last loss, and write the checkpoint."""
    late = begin_with is not None
    plan = Plan(
        *(1.0, steps, BATCH, 1e-3, 1, checkpoint, None), begin_with=begin_with, late_layers=late
    )
    with together("cpu") as ranks:
        torch.set_num_threads(1)
        training, batches = Training(plan, ranks), KnownBatches(ranks)
        losses: list[dict[str, Any]] = [training.advance(batches) for _ in range(steps)]
        mean = torch.stack([each["class"] for each in losses])
        if ranks.world > 1:
            torch.distributed.all_reduce(mean)
        if ranks.rank == 0:
            training.save()
            print(*(mean / ranks.world).tolist())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
