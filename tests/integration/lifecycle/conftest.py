"""Models that count, as the unit tests of the same room have them."""

from tests.unit.lifecycle.conftest import counted, gate
from tests.unit.lifecycle.control.conftest import world

__all__ = ["counted", "gate", "world"]
