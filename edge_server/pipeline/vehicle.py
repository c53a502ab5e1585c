"""VehicleInputs: what the vehicle measures of itself, for tracking and warnings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

Indicator = Literal["unknown", "off", "left", "right", "hazard"]

# At 1 rad/s a heading that is older is off by half a radian.
OLDEST_S = 0.5


@dataclass(frozen=True)
class VehicleState:
    """What the vehicle measured at one moment; axes as in ISO 8855, None where it is not known.

    Attributes:
        mono_ns: CLOCK_MONOTONIC of the measurement.
        speed_mps: m/s, positive forward.
        yaw_rate_radps: rad/s, positive turns to the left.
        indicator: of the turn signals.
    """

    mono_ns: int
    speed_mps: float | None = None
    yaw_rate_radps: float | None = None
    indicator: Indicator = "unknown"


class VehicleInputs:
    """The newest state of the vehicle; safe from any thread, and no call waits."""

    def __init__(self) -> None:
        self._newest: VehicleState | None = None

    def put(self, state: VehicleState) -> None:
        """Keep `state`, unless a newer one is known."""
        newest = self._newest
        if newest is None or state.mono_ns >= newest.mono_ns:
            self._newest = state

    def at(self, mono_ns: int | None = None) -> VehicleState:
        """Return the newest state, or one that knows nothing where that is older than `OLDEST_S`.

        Args:
            mono_ns: the moment; None for now.
        """
        now_ns = time.monotonic_ns() if mono_ns is None else mono_ns
        newest = self._newest
        if newest is None or now_ns - newest.mono_ns > OLDEST_S * 1e9:
            return VehicleState(now_ns)
        return newest
