"""What is shipped is made of these sources, and is what a driver can load."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import edge_server.gpu
from edge_server.errors import Unavailable
from edge_server.gpu.preprocess_kernel import image_name, kernel_image

FATBIN_MAGIC = bytes.fromhex("50ed55ba")
NAMES = {
    f"{pixel_format}_to_nchw{undistorted}"
    for pixel_format in ("bgr", "grey", "yuy2", "nv12", "i420")
    for undistorted in ("", "_undistorted")
}


@pytest.fixture
def kernels() -> Path:
    """Where the sources and the images lie."""
    return Path(edge_server.gpu.__file__).parent / "kernels"


def test_images_are_made_of_these_sources(kernels: Path) -> None:
    """The cheap half of `scripts/build_kernels --check`."""
    manifest = json.loads((kernels / "manifest.json").read_text())
    sources = {p.name for p in kernels.iterdir() if p.suffix in {".cu", ".cuh", ".h"}}
    assert set(manifest["sources"]) == sources
    digests = manifest["sources"] | {n: i["sha256"] for n, i in manifest["images"].items()}
    for name, digest in digests.items():
        found = hashlib.sha256((kernels / name).read_bytes()).hexdigest()
        assert found == digest, f"{name} has changed: run scripts/build_kernels"
    for image in manifest["images"].values():
        assert set(image["kernels"]) == NAMES


def test_an_orin_gets_code_that_jetpack_5_and_6_know() -> None:
    image = kernel_image((8, 7), 11040)
    assert image[:4] == b"\x7fELF"
    # CUDA 11 and 12: OS ABI 0x33, version 7. CUDA 13 writes 0x41, version 8.
    assert tuple(image[7:9]) == (0x33, 7)
    assert image_name((8, 7), 12060) == image_name((8, 7), 13020)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((7, 5), 75), ((8, 0), 80), ((8, 6), 80), ((8, 9), 80), ((9, 0), 90)],
)
def test_gpus_that_cuda_11_knew_need_no_driver_for_13(
    capability: tuple[int, int], architecture: int
) -> None:
    assert image_name(capability, 11080) == f"preprocess_sm_{architecture}.cubin"
    assert tuple(kernel_image(capability, 12040)[7:9]) == (0x33, 7)


@pytest.mark.parametrize("capability", [(10, 0), (11, 0), (12, 1)])
def test_newer_gpus_get_the_fatbin(capability: tuple[int, int]) -> None:
    assert kernel_image(capability, 13000)[:4] == FATBIN_MAGIC


@pytest.mark.parametrize(
    ("capability", "driver", "text"),
    [
        ((12, 0), 12080, "CUDA 13.0 or newer, this one is for 12.8"),
        ((8, 7), 10020, "CUDA 11.4 or newer, this one is for 10.2"),
    ],
)
def test_what_cannot_be_loaded_is_said_before(
    capability: tuple[int, int], driver: int, text: str
) -> None:
    with pytest.raises(Unavailable, match=text):
        kernel_image(capability, driver)
