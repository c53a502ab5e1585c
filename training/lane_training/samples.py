"""The stream of training images: a loader process fills a ring that the trainer draws from."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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

RING_SIZE = 2500
USES_PER_IMAGE = 2.0
READY_IMAGES = 300
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
    """Shared memory of the loader and the trainer."""

    images: Tensor
    lanes: Tensor
    meta: Tensor
    counts: Tensor  # written, drawn


def _fill_ring(ring: _Ring, material: Material | None, seed: int) -> None:
    """The loader process: keeps ahead of the trainer by a steady number of uses per image."""
    os.nice(LOADER_NICENESS)
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    parent = os.getppid()
    stream = SampleStream(material, np.random.default_rng(seed))
    images, lanes, meta = ring.images.numpy(), ring.lanes.numpy(), ring.meta.numpy()
    while os.getppid() == parent:
        written, drawn = int(ring.counts[0]), int(ring.counts[1])
        if written > READY_IMAGES + drawn / USES_PER_IMAGE:
            time.sleep(0.02)
            continue
        sample, slot = next(stream), written % RING_SIZE
        images[slot], lanes[slot] = sample.bgr, sample.x_px
        facts = sample.complete, sample.own_lane, *sample.vanishing_px
        meta[slot] = (*facts, *sample.lane_weight)
        ring.counts[0] = written + 1


class SampleRing:
    """Random batches, each image drawn about twice, mirrored at will."""

    def __init__(self, material: Material | None, seed: int) -> None:
        """Starts the loader; it ends with this process."""
        self._rng = np.random.default_rng(seed)
        self._ring = _Ring(
            torch.zeros(RING_SIZE, INPUT_HEIGHT_PX, INPUT_WIDTH_PX, 3, dtype=torch.uint8),
            torch.zeros(RING_SIZE, MAX_LANES, ROW_COUNT),
            torch.zeros(RING_SIZE, META_COLUMNS),
            torch.zeros(2, dtype=torch.int64),
        )
        for part in vars(self._ring).values():
            part.share_memory_()
        self._loader = multiprocessing.get_context("spawn").Process(
            target=_fill_ring, args=(self._ring, material, seed), daemon=True
        )
        self._loader.start()

    def _written(self) -> int:
        if not self._loader.is_alive():
            raise RuntimeError("the loader process ended; its error stands above")
        return int(self._ring.counts[0])

    def batch(self, size: int) -> tuple[Tensor, Targets]:
        """Images (B, 3, 360, 640) bfloat16 BGR 0..1 in channels-last memory, and their labels."""
        written = self._written()
        while written < READY_IMAGES:
            time.sleep(0.1)
            written = self._written()
        slots = torch.from_numpy(self._rng.integers(0, min(written, RING_SIZE), size))
        mirrored = torch.from_numpy(self._rng.random(size) < 0.5)
        self._ring.counts[1] += size
        images = self._ring.images[slots]
        images[mirrored] = images[mirrored].flip(2)
        lanes, meta = self._ring.lanes[slots], self._ring.meta[slots]
        lanes[mirrored] = INPUT_WIDTH_PX - lanes[mirrored]
        vanishing = meta[:, 2:4].clone()
        vanishing[mirrored, 0] = INPUT_WIDTH_PX - vanishing[mirrored, 0]
        scaled = images.permute(0, 3, 1, 2).to(torch.bfloat16).div_(255.0)
        targets = Targets(lanes, meta[:, 4:], meta[:, 0] > 0, meta[:, 1] > 0, vanishing)
        return scaled, targets


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
