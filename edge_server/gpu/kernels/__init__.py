"""The compiled preprocessing kernels, by GPU and driver."""

from __future__ import annotations

from importlib import resources

from edge_server.errors import Unavailable

_OLDEST = (7, 5)
# Compute capability → image, and the oldest driver that loads the image; the last entry not newer
# than the GPU applies. scripts/build_kernels gives the reasons. Code for 8.0 also runs on 8.6 and
# 8.9.
_IMAGES = {
    (7, 5): ("preprocess_sm_75.cubin", 11040),
    (8, 0): ("preprocess_sm_80.cubin", 11040),
    (8, 7): ("preprocess_sm_87.cubin", 11040),
    (8, 8): ("preprocess_sm_80.cubin", 11040),
    (9, 0): ("preprocess_sm_90.cubin", 11080),
    (10, 0): ("preprocess.fatbin", 13000),
}


def image_name(compute_capability: tuple[int, int], driver_version: int) -> str:
    """Return the file in this directory that a driver can load for its GPU.

    Args:
        compute_capability: of the GPU, (8, 7) for an Orin.
        driver_version: the newest CUDA version that the driver supports, as cuDriverGetVersion
            returns it: 12060 for 12.6.

    Raises:
        Unavailable: no shipped image fits; the text names the supported GPUs and drivers.
    """
    major, minor = compute_capability
    if compute_capability < _OLDEST:
        raise Unavailable(
            f"the preprocessing kernels are compiled for compute capability 7.5 and newer, this "
            f"GPU has {major}.{minor}; preprocess on the CPU (instance_group KIND_CPU)"
        )
    name, needed = _IMAGES[max(known for known in _IMAGES if known <= compute_capability)]
    if driver_version < needed:
        raise Unavailable(
            f"the preprocessing kernels need a driver for CUDA {_text(needed)} or newer, this one "
            f"is for {_text(driver_version)}; update the driver, or preprocess on the CPU "
            f"(instance_group KIND_CPU)"
        )
    return name


def kernel_image(compute_capability: tuple[int, int], driver_version: int) -> bytes:
    """Return the image's bytes, in the form that cuModuleLoadData takes; see `image_name`."""
    name = image_name(compute_capability, driver_version)
    return (resources.files("edge_server.gpu.kernels") / name).read_bytes()


def _text(driver_version: int) -> str:
    return f"{driver_version // 1000}.{driver_version % 1000 // 10}"
