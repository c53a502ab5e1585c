"""NVDLA support by device, and the error text for a missing core."""

from __future__ import annotations

# Documented by NVIDIA for Orin; on a device, the number of cores that TensorRT reports decides.
MATRIX = (
    "NVDLA works with JetPack 5.1 (TensorRT 8.5), 6.0 (8.6) and 6.1 to 6.2 (10.3), on AGX Orin "
    "also with TensorRT 11.4.1; not with JetPack 7.2 (10.16), and not on Orin Nano, which has none"
)


def no_such_core(core: int, cores: int, tensorrt: str) -> str:
    """Return the text for a missing core; its first part is Triton's."""
    return (
        f"unable to create TensorRT runtime with DLA Core ID: {core}, available number of DLA "
        f"cores: {cores}; TensorRT {tensorrt}. {MATRIX}. Take secondary_devices out of the "
        "instance_group and build the plan for the GPU, or allow that with the parameter "
        "dla_fallback"
    )
