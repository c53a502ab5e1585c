"""Plans of the simulated TensorRT, as the unit tests have them."""

from tests.unit.backends.tensorrt.conftest import ask, own_build_lock, workshop

__all__ = ["ask", "own_build_lock", "workshop"]
