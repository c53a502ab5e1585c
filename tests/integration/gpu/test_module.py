"""Kernels are found by name and get their arguments as they were given."""

from __future__ import annotations

import gc
import subprocess
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.errors import InternalError, Unavailable
from edge_server.gpu.memory import DeviceMemory, MappedMemory
from edge_server.gpu.stream import Module, Stream

if TYPE_CHECKING:
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu

    from edge_server.gpu.device import Device

SHIM = """
const char signature_mix[] = "Pif4s";
struct Pair { short a, b; };
void launch_mix(void **arguments, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                unsigned bz) {
    float *to = *(float **)arguments[0];
    to[0] = *(int *)arguments[1];
    to[1] = *(float *)arguments[2];
    struct Pair pair = *(struct Pair *)arguments[3];
    to[2] = pair.a;
    to[3] = pair.b;
    to[4] = gx * 100 + gy * 10 + gz;
    to[5] = bx * 100 + by * 10 + bz;
}
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shim.c").write_text(SHIM)
    library = str(tmp_path / "shim.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "shim.c")], check=True)
    monkeypatch.setenv("EDGE_SIMULATED_KERNELS", library)


def test_a_kernel_gets_its_arguments_and_its_grid(kernels: None, device: Device) -> None:
    stream = Stream(device)
    out = MappedMemory(device, (6,), np.float32)
    out.array[:] = 0
    kernel = Module(device, b"image").kernel("mix", "Pif4s")
    pair = np.array([-3, 9], np.int16).tobytes()
    stream.launch(kernel, (2, 3), (4, 5, 6), out, -7, 0.5, pair)
    assert out.array.tolist() == [0] * 6
    stream.synchronize()
    assert out.array.tolist() == [-7, 0.5, -3, 9, 231, 456]


def test_kernels_in_a_cycle_are_unloaded_whatever_thread_collects_them(
    kernels: None, device: Device
) -> None:
    cycle: list[object] = [Module(device, b"image").kernel("mix", "Pif4s")]
    cycle.append(cycle)
    del cycle
    # pycuda warns, and leaks, where a module is dropped without its context.
    collecting = threading.Thread(target=gc.collect)
    collecting.start()
    collecting.join()


def test_the_error_of_a_launch_keeps_no_object_of_pycuda_alive(
    kernels: None, device: Device, simulated_gpu: SimulatedGpu
) -> None:
    stream, out = Stream(device), DeviceMemory(device, 24)
    kernel = Module(device, b"image").kernel("mix", "Pif4s")
    simulated_gpu.set("fail=cuLaunchKernel:701:0")
    errors = []
    with pytest.raises(InternalError) as caught:
        stream.launch(kernel, (1,), (1,), out, 1, 2.0, b"abcd")
    errors.append(caught.value)
    del kernel, caught
    # A thread without the context drops the last reference to the error.
    dropping = threading.Thread(target=errors.clear)
    dropping.start()
    dropping.join()
    collecting = threading.Thread(target=gc.collect)
    collecting.start()
    collecting.join()


def test_a_kernel_outlives_the_name_of_its_module(kernels: None, device: Device) -> None:
    kernel = Module(device, b"image").kernel("mix", "Pif4s")
    stream, out = Stream(device), DeviceMemory(device, 24)
    stream.launch(kernel, (1,), (1,), out, 1, 2.0, b"abcd")
    stream.synchronize()


def test_a_kernel_that_is_not_there_is_named(kernels: None, device: Device) -> None:
    with pytest.raises(InternalError, match=r"^GPU 0: find kernel blur: .*named symbol not found"):
        Module(device, b"image").kernel("blur", "P")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (200, "is damaged, .*; reinstall edge-server, or compile them"),
        (209, "not compiled for this GPU"),
        (218, r"cannot compile their PTX; .*\(scripts/build_kernels\)"),
        (221, r"libnvidia-ptxjitcompiler\.so\.1, is missing; .*nvidia-l4t-cuda"),
        (222, "not compiled for this GPU"),
        (223, "take CUDA_DISABLE_PTX_JIT out of the environment"),
    ],
)
def test_kernels_that_the_driver_does_not_take_are_told_with_the_remedy(
    device: Device, simulated_gpu: SimulatedGpu, code: int, remedy: str
) -> None:
    simulated_gpu.set(f"fail=cuModuleLoadDataEx:{code}:0")
    with pytest.raises(Unavailable, match=rf"^GPU 0: load kernels: .*{remedy}"):
        Module(device, b"image")
