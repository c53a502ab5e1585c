"""The preprocessing as one writes it with torch, an operation for each step."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from edge_server.pixels import PixelFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH, HEIGHT = 1920, 1080
PIECES, REPEATS = 20, 15

try:
    import torch
except ImportError:
    torch = None


def note() -> str:
    """What was compared with."""
    if torch is None:
        return "torch is not here: not compared"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU: not compared"
    return (
        f"torch {torch.__version__}: its operations run one by one, without torch.compile; frames "
        "are in torch's memory already"
    )


def gpu_us(
    pixel_format: PixelFormat, frame: NDArray[np.uint8], size: tuple[int, int], half: bool
) -> float | None:
    """Time on the GPU for one frame, by its clock; None where torch cannot."""
    if torch is None or not torch.cuda.is_available():
        return None
    # Other memory each time, as the kernel's turn is, too.
    count = max(2, (256 << 20) // frame.nbytes)
    frames = torch.from_numpy(frame).cuda().repeat(count, 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us = []
    for _ in range(REPEATS):
        # Busy while the host gives it the operations.
        torch.cuda._sleep(50_000_000)  # noqa: SLF001 - torch has no other
        begin.record()
        for i in range(PIECES):
            preprocess(pixel_format, frames[i % count], size, half)
        end.record()
        end.synchronize()
        times_us.append(1e3 * begin.elapsed_time(end) / PIECES)
    return statistics.median(times_us)


def preprocess(pixel_format: PixelFormat, frame: Any, size: tuple[int, int], half: bool) -> Any:
    """(1, 3, H, W) planes B, G, R of a flat uint8 frame, 0..1."""
    bgr = planes_of(pixel_format, frame)[None]
    # As OpenCV's: sample centres at half pixels, no antialiasing.
    small = torch.nn.functional.interpolate(bgr, size, mode="bilinear", align_corners=False)
    small = small * (1 / 255)
    return small.half() if half else small


def planes_of(pixel_format: PixelFormat, frame: Any) -> Any:
    """(3, H, W) float32, 0..255; BT.709, limited range."""
    if pixel_format is PixelFormat.BGR:
        return frame.reshape(HEIGHT, WIDTH, 3).permute(2, 0, 1).float()
    luma, u, v = yuv_of(pixel_format, frame)
    y = 255 / 219 * (luma - 16)
    u, v = 255 / 224 * (u - 128), 255 / 224 * (v - 128)
    blue, green, red = y + 1.8556 * u, y - 0.18732 * u - 0.46812 * v, y + 1.5748 * v
    return torch.stack([blue, green, red]).clamp(0, 255)


def yuv_of(pixel_format: PixelFormat, frame: Any) -> tuple[Any, Any, Any]:
    """Each (H, W) float32."""
    luma = frame[: WIDTH * HEIGHT].reshape(HEIGHT, WIDTH).float()
    behind = frame[WIDTH * HEIGHT :]
    match pixel_format:
        case PixelFormat.GREY:
            return luma, torch.full_like(luma, 128), torch.full_like(luma, 128)
        case PixelFormat.YUY2:
            pixels = frame.reshape(HEIGHT, WIDTH // 2, 4).float()
            luma = pixels[..., 0::2].reshape(HEIGHT, WIDTH)
            u, v = (pixels[..., i].repeat_interleave(2, dim=1) for i in (1, 3))
            return luma, u, v
        case PixelFormat.NV12:
            planes = behind.reshape(HEIGHT // 2, WIDTH // 2, 2).permute(2, 0, 1).float()
        case _:
            planes = behind.reshape(2, HEIGHT // 2, WIDTH // 2).float()
    u, v = torch.nn.functional.interpolate(planes[None], scale_factor=2, mode="nearest")[0]
    return luma, u, v
