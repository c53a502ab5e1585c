"""Models that count, as the unit tests of the same room have them."""

from support.counted_backend import counted, gate
from unit.lifecycle.control.world import world

__all__ = ["counted", "gate", "world"]
