"""The kernels, compiled for this CPU, as the unit tests have them."""

from tests.unit.gpu.kernels.conftest import build_shim, compiler, kernels, shim

__all__ = ["build_shim", "compiler", "kernels", "shim"]
