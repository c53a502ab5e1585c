"""Several processes that train one network together, as torchrun starts them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone it is the first of one.

    Attributes:
        device: what this process computes on.
    """

    device: torch.device
    rank: int = 0
    world: int = 1

    def share(self, batch: int) -> int:
        """This process's part of a batch."""
        return batch // self.world

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network, with gradients that are the mean over all processes.

        Normalisation takes out each part's own mean and variance; the first process's are kept.
        """
        if self.world == 1:
            return network
        return nn.parallel.DistributedDataParallel(network, broadcast_buffers=False)

    def agree(self, value: float) -> float:
        """The first process's value."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        distributed.broadcast(shared, 0)
        return float(shared)


@contextlib.contextmanager
def together(name: str) -> Iterator[Ranks]:
    """Joins the processes of torchrun, by its environment variables; without them trains alone.

    Args:
        name: of the device, `cpu`, `cuda` (of torchrun's processes, to each its own) or `cuda:1`.
    """
    device = torch.device(name)
    cuda = device.type == "cuda"
    if cuda:
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        # Every step has images of the same size.
        torch.backends.cudnn.benchmark = True
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(device)
        return
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield Ranks(device, distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
