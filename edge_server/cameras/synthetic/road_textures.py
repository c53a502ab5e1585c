"""Noise for the ground and a painted sky: the pixel textures of a rendered road."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXTURE_PX = 512
TEXTURE_MIDDLE = 128


def noise_tile(rng: np.random.Generator, scales: tuple[int, ...]) -> NDArray[np.float32]:
    """Return (512, 512) float32 noise of several octaves, about -1..1, periodic at its edges."""
    tile = np.zeros((TEXTURE_PX, TEXTURE_PX), np.float32)
    for cells in scales:
        coarse = rng.standard_normal((cells, cells)).astype(np.float32)
        wrapped = np.pad(coarse, 2, mode="wrap")
        size = TEXTURE_PX * (cells + 4) // cells
        pad = 2 * TEXTURE_PX // cells
        tile += cv2.resize(wrapped, (size, size))[pad : pad + TEXTURE_PX, pad : pad + TEXTURE_PX]
    return np.asarray(tile / len(scales) ** 0.5, np.float32)


def backdrop(rng: np.random.Generator, *, mainstream: bool) -> NDArray[np.uint8]:
    """Return sky with a few clouds, and two ranges of hills along the bottom edge."""
    height, width = 200, 640
    zenith = np.array(
        (205, 150, 95) if mainstream else rng.uniform((120, 110, 80), (235, 200, 190))
    )
    haze = np.array((235, 220, 205)) if mainstream else rng.uniform(150, 245, 3)
    fade = np.linspace(0, 1, height)[:, None, None] ** 1.5
    sky = (zenith * (1 - fade) + haze * fade).astype(np.float32).repeat(width, 1)
    cloud = cv2.resize(noise_tile(rng, (4, 8, 16, 32))[:, :128], (width, height))
    cover = np.clip(cloud - rng.uniform(0.3, 1.2), 0, 1)[..., None] * (1 - 0.5 * fade)
    sky += (245 - sky) * np.minimum(cover, 0.8)
    columns = np.arange(width)
    for share, tone in ((0.22, 0.45), (0.1, 0.8)):
        waves = np.zeros(width)
        for k in (1, 2, 5, 9, 23):
            waves += np.sin(columns / width * 2 * np.pi * k + rng.uniform(0, 6.28)) / k
        crest = height * (1 - share * rng.uniform(0.3, 1.0) * (1.1 + 0.5 * waves))
        hills = np.arange(height)[:, None] > crest[None]
        green = np.array((75, 95, 80)) if mainstream else rng.uniform(40, 130, 3)
        sky[hills] = haze + (green - haze) * tone
    return np.clip(sky, 0, 255).astype(np.uint8)
