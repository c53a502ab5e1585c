"""The stream of training images: loader processes fill a ring that the trainer draws from."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from torch import Tensor

from edge_server.lanes.decode import INPUT_WIDTH_PX, ROW_COUNT
from edge_server.tools.road.scene import RoadScene
from lane_training import frames
from lane_training.anchors import INPUT_HEIGHT_PX
from lane_training.augment import (
    MAX_LANES,
    GeometryWarp,
    Photographer,
    Sample,
    ground_warp,
    labels_on_rows,
)
from lane_training.loss import Targets
from lane_training.roads import LONGEST_DRIVE_M, render_road, sample_road

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lane_training.material import Material

CPU = torch.device("cpu")
# For batches up to the small one; a larger batch has as many more. An image takes 0.7 MB.
SMALL_BATCH, RING_SIZE, READY_IMAGES = 16, 2500, 300
USES_PER_IMAGE = 2.0
LOADER_NICENESS = 5
HUMAN_SHARE, TAUGHT_SHARE = 0.52, 0.14
GEOMETRY_SHARE = 0.45
LIGHT_SHARE = 0.35
FRAMES_PER_SCENE = 3
CAMERA_SCENE_SHARE = 0.2
META_COLUMNS = 4 + MAX_LANES


class SampleStream:
    """An endless, seeded mix of human-labelled, taught and rendered roads."""

    def __init__(self, material: Material | None, rng: np.random.Generator) -> None:
        """Without material every sample is rendered."""
        self._rng = rng
        self._photograph = Photographer(rng)
        self._human = material.groups() if material else []
        self._shares = [group.share for group in self._human]
        folder = material.folder if material else None
        self._taught = frames.taught_frames(folder) if folder else []
        self._bend = GeometryWarp(material.geometries() if material else [])
        self._scene = sample_road(rng)
        self._scene_uses = 0

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Sample:
        choice = self._rng.random()
        light = self._rng.random() < LIGHT_SHARE
        strength = 0.35 if light else 1.0
        if self._human and choice < HUMAN_SHARE:
            images = self._human[int(self._rng.choice(len(self._shares), p=self._shares))].images
            frame = images[int(self._rng.integers(len(images)))]
            warp = self._bend if self._rng.random() < GEOMETRY_SHARE else ground_warp
            sample = warp(frame, self._rng, strength)
        elif self._taught and choice < HUMAN_SHARE + TAUGHT_SHARE:
            # By source first: the long clip would drown the others.
            taught = self._taught[int(self._rng.integers(len(self._taught)))]
            frame = taught[int(self._rng.integers(len(taught)))]
            sample = ground_warp(frame, self._rng, strength)
        else:
            sample = self.rendered()
        image = self._photograph(sample.bgr, self._rng, light=light)
        return replace(sample, bgr=image)

    def rendered(self) -> Sample:
        """A synthetic road; a scene is expensive to sample and is driven through a few times."""
        if self._scene_uses == FRAMES_PER_SCENE:
            self._scene_uses = 0
            if self._rng.random() < CAMERA_SCENE_SHARE:
                self._scene = RoadScene.for_camera(int(self._rng.integers(1 << 31)))
            else:
                self._scene = sample_road(self._rng)
        self._scene_uses += 1
        return _rendered_sample(self._scene, self._rng)


@dataclass(frozen=True)
class _Ring:
    """Memory that the loaders and the trainer share; each loader has `share` slots of its own."""

    share: int
    images: Any
    lanes: Any
    meta: Any
    counts: Any  # written by each loader, then drawn by the trainer; each has one writer

    @classmethod
    def of(cls, loaders: int, share: int) -> _Ring:
        """Empty, and in a file where /dev/shm is too small for it."""
        size, spawn = loaders * share, multiprocessing.get_context("spawn")
        return cls(
            share,
            spawn.RawArray("B", size * INPUT_HEIGHT_PX * INPUT_WIDTH_PX * 3),
            spawn.RawArray("f", size * MAX_LANES * ROW_COUNT),
            spawn.RawArray("f", size * META_COLUMNS),
            spawn.RawArray("q", loaders + 1),
        )

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Images (N, 360, 640, 3) uint8, lanes (N, 5, 72) and meta (N, 9) float32; the counts."""
        return (
            np.frombuffer(self.images, np.uint8).reshape(-1, INPUT_HEIGHT_PX, INPUT_WIDTH_PX, 3),
            np.frombuffer(self.lanes, np.float32).reshape(-1, MAX_LANES, ROW_COUNT),
            np.frombuffer(self.meta, np.float32).reshape(-1, META_COLUMNS),
            np.frombuffer(self.counts, np.int64),
        )


@dataclass(frozen=True)
class Loaders:
    """The processes that make training images.

    Attributes:
        count: of this trainer.
        first: number of the first among those of all trainers; each has other samples.
        batch: images that the trainer draws at once.
    """

    count: int = 1
    first: int = 0
    batch: int = SMALL_BATCH

    @property
    def larger(self) -> float:
        """By how much more images are kept than for a small batch."""
        return max(1.0, self.batch / SMALL_BATCH)

    @property
    def ready_images(self) -> int:
        """So many are there before the first batch."""
        return round(READY_IMAGES * self.larger)


def seeded(seed: int, number: int) -> np.random.Generator:
    """The generator of loader or trainer `number`; the first has the seed's own samples."""
    return np.random.default_rng((seed, number) if number else seed)


def _fill_ring(
    ring: _Ring, loaders: Loaders, place: int, material: Material | None, seed: int
) -> None:
    """A loader process: keeps ahead of the trainer by a steady number of uses per image."""
    os.nice(LOADER_NICENESS)
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    parent = os.getppid()
    stream = SampleStream(material, seeded(seed, loaders.first + place))
    images, lanes, meta, counts = ring.arrays()
    while os.getppid() == parent:
        written, drawn = int(counts[place]), int(counts[-1])
        if loaders.count * written > loaders.ready_images + drawn / USES_PER_IMAGE:
            time.sleep(0.02)
            continue
        sample, slot = next(stream), place * ring.share + written % ring.share
        images[slot], lanes[slot] = sample.bgr, sample.x_px
        facts = sample.complete, sample.own_lane, *sample.vanishing_px
        meta[slot] = (*facts, *sample.lane_weight)
        counts[place] = written + 1


class SampleRing:
    """Random batches, each image drawn about twice, mirrored at will."""

    def __init__(
        self,
        material: Material | None,
        seed: int,
        loaders: Loaders = Loaders(),
        device: torch.device = CPU,
    ) -> None:
        """Starts the loaders; they end with this process."""
        self._loaders, self._device = loaders, device
        self._rng = seeded(seed, loaders.first)
        self._ring = _Ring.of(loaders.count, math.ceil(RING_SIZE * loaders.larger / loaders.count))
        *parts, self._counts = self._ring.arrays()
        self._images, self._lanes, self._meta = map(torch.from_numpy, parts)
        spawn = multiprocessing.get_context("spawn")
        self._processes = [
            spawn.Process(
                target=_fill_ring, args=(self._ring, loaders, place, material, seed), daemon=True
            )
            for place in range(loaders.count)
        ]
        for process in self._processes:
            process.start()

    def _filled(self) -> NDArray[np.int64]:
        """(N,) slots of each loader that have an image."""
        if not all(process.is_alive() for process in self._processes):
            raise RuntimeError("a loader process ended; its error stands above")
        return np.minimum(self._counts[:-1], self._ring.share)

    def _slots(self, size: int) -> Tensor:
        filled = self._filled()
        while filled.sum() < self._loaders.ready_images:
            time.sleep(0.1)
            filled = self._filled()
        drawn = self._rng.integers(0, filled.sum(), size)
        ends = filled.cumsum()
        place = np.searchsorted(ends, drawn, side="right")
        return torch.from_numpy(place * self._ring.share + drawn - (ends - filled)[place])

    def _on_device(self, values: Tensor, slots: Tensor) -> Tensor:
        """The rows of `values` at `slots`, on their way to the device."""
        cuda = self._device.type == "cuda"
        rows = torch.empty((len(slots), *values.shape[1:]), dtype=values.dtype, pin_memory=cuda)
        torch.index_select(values, 0, slots, out=rows)
        return rows.to(self._device, non_blocking=True)

    def batch(self, size: int) -> tuple[Tensor, Targets]:
        """Images (B, 3, 360, 640) bfloat16 BGR 0..1 in channels-last memory, and their labels, on
        the device."""
        slots = self._slots(size)
        chosen = torch.from_numpy(self._rng.random(size) < 0.5)
        self._counts[-1] += size
        mirrored = self._on_device(chosen, torch.arange(size))
        images = self._on_device(self._images, slots)
        images = torch.where(mirrored[:, None, None, None], images.flip(2), images)
        scaled = images.permute(0, 3, 1, 2).to(torch.bfloat16).div_(255.0)
        lanes = self._on_device(self._lanes, slots)
        lanes = torch.where(mirrored[:, None, None], INPUT_WIDTH_PX - lanes, lanes)
        meta = self._on_device(self._meta, slots)
        x, y = meta[:, 2], meta[:, 3]
        vanishing = torch.stack((torch.where(mirrored, INPUT_WIDTH_PX - x, x), y), 1)
        return scaled, Targets(lanes, meta[:, 4:], meta[:, 0] > 0, meta[:, 1] > 0, vanishing)


def _rendered_sample(scene: RoadScene, rng: np.random.Generator) -> Sample:
    distance_m = rng.uniform(0, LONGEST_DRIVE_M)
    image, lanes = render_road(scene, distance_m, INPUT_WIDTH_PX, INPUT_HEIGHT_PX)
    return Sample(image, *labels_on_rows(lanes, begin_in_picture=True))


def rendered_set(count: int, seed: int) -> list[Sample]:
    """Synthetic roads for measuring, each from a scene of its own."""
    rngs = [np.random.default_rng((seed, number)) for number in range(count)]
    return [_rendered_sample(sample_road(rng), rng) for rng in rngs]


def camera_set(count: int, seed: int) -> list[Sample]:
    """What the synthetic camera shows, each from a road of its own."""
    rng = np.random.default_rng(seed)
    return [_rendered_sample(RoadScene.for_camera(seed + i), rng) for i in range(count)]


def as_array(samples: list[Sample]) -> NDArray[np.uint8]:
    """(N, 360, 640, 3) uint8."""
    return np.stack([sample.bgr for sample in samples])
