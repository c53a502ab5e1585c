"""Remedies fit the way edge_server was installed."""

from __future__ import annotations

import pytest

from edge_server.board.installation import Installation, installation, remedy

PACKAGE, WHEEL, CHECKOUT = Installation.PACKAGE, Installation.WHEEL, Installation.CHECKOUT
MODULES = (
    "onnxruntime",
    "cv2",
    "tensorrt",
    "pycuda",
    "cryptography",
    "gi",
    "msgspec",
)


def test_these_tests_run_from_a_checkout() -> None:
    assert installation() is CHECKOUT


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
@pytest.mark.parametrize("module", MODULES)
def test_no_remedy_of_a_package_is_pip_and_none_of_a_wheel_is_the_package(
    module: str, machine: str
) -> None:
    assert "pip install" not in remedy(module, how=PACKAGE, machine=machine)
    assert "apt install --reinstall" not in remedy(module, how=WHEEL, machine=machine)


def test_only_a_checkout_has_scripts() -> None:
    assert remedy("pycuda", how=CHECKOUT) == "build it with scripts/install_pycuda"
    assert "scripts/" not in remedy("pycuda", how=WHEEL)


def test_a_board_has_opencv_and_tensorrt_from_apt() -> None:
    for how in Installation:
        assert "sudo apt install python3-opencv" in remedy("cv2", how=how, machine="aarch64")
        assert "python3-libnvinfer" in remedy("tensorrt", how=how, machine="aarch64")
    assert remedy("cv2", how=WHEEL, machine="x86_64") == "pip install 'edge-server[onnxruntime]'"
    assert "--reinstall edge-server" in remedy("cv2", how=PACKAGE, machine="x86_64")


@pytest.mark.parametrize("module", ["torch", "tensorflow", "openvino", "paddle"])
def test_a_framework_is_an_extra_of_a_wheel_and_has_its_own_environment_beside_a_package(
    module: str,
) -> None:
    backend = {"torch": "pytorch"}.get(module, module)
    assert remedy(module, how=WHEEL) == f"pip install 'edge-server[{backend}]'"
    assert remedy(module, how=CHECKOUT) == f"pip install 'edge-server[{backend}]'"
    there = f"/opt/edge-server-{backend}"
    found = remedy(module, how=PACKAGE)
    assert f"sudo python3 -m venv {there} && sudo {there}/bin/pip install" in found
    assert f'interpreters = {{ {backend} = "{there}/bin/python" }}' in found
