"""VehicleInputs: what the vehicle measures of itself, for tracking and warnings."""

from __future__ import annotations

import math
import time
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import InvalidRequest
from edge_server.lanes.types import VehicleState
from edge_server.proto.edge.lanes.v1 import lane_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.lanes.types import Indicator

# At 1 rad/s a heading that is older is off by half a radian.
OLDEST_S = 0.5
# Beyond these a unit is wrong, or a bus gives a value that stands for none; in the trackers' powers
# of the way ahead, numbers without bounds have no result.
_LARGEST: Mapping[str, float] = MappingProxyType({"speed_mps": 150.0, "yaw_rate_radps": 10.0})
# Clocks of one host agree; a moment that is later than this was not measured yet.
_FUTURE_NS = 10_000_000
_INDICATORS: Mapping[int, Indicator] = MappingProxyType(
    {
        pb.INDICATOR_UNSPECIFIED: "unknown",
        pb.INDICATOR_OFF: "off",
        pb.INDICATOR_LEFT: "left",
        pb.INDICATOR_RIGHT: "right",
        pb.INDICATOR_HAZARD: "hazard",
    }
)


def vehicle_state(request: pb.SetVehicleStateRequest, now_ns: int) -> VehicleState:
    """Return what `request` says of the vehicle, which has just arrived over gRPC or MQTT.

    Args:
        request: with `mono_ns` 0 it was measured now.

    Raises:
        InvalidRequest: a number is not finite or no vehicle's, the indicator unknown, or the moment
            in the future.
    """
    measured: dict[str, float] = {}
    for name, largest in _LARGEST.items():
        if request.HasField(name):
            measured[name] = getattr(request, name)
            if not math.isfinite(measured[name]):
                raise InvalidRequest(f"{name} is {measured[name]}: it is a finite number")
            if abs(measured[name]) > largest:
                raise InvalidRequest(
                    f"{name} is {measured[name]:g}: a vehicle's is from -{largest:g} to "
                    f"{largest:g}; leave out what is not known"
                )
    indicator = _INDICATORS.get(request.indicator)
    if indicator is None:
        raise InvalidRequest(f"indicator is {request.indicator}: it is a value of Indicator")
    mono_ns = request.mono_ns or now_ns
    if not 0 < mono_ns <= now_ns + _FUTURE_NS:
        raise InvalidRequest(
            f"mono_ns is {mono_ns}, and this device's CLOCK_MONOTONIC is {now_ns}: the "
            "measurement cannot be later; 0 is now"
        )
    return VehicleState(mono_ns, **measured, indicator=indicator)


class VehicleInputs:
    """The newest state of the vehicle; safe from any thread, and no call waits."""

    def __init__(self) -> None:
        self._newest: VehicleState | None = None

    def put(self, state: VehicleState) -> None:
        """Keep `state`, unless a newer one is known."""
        newest = self._newest
        if newest is None or state.mono_ns >= newest.mono_ns:
            self._newest = state

    def at(self, mono_ns: int | None = None) -> VehicleState | None:
        """Return the newest state; None where that is older than `OLDEST_S`.

        Args:
            mono_ns: the moment; None for now.
        """
        now_ns = time.monotonic_ns() if mono_ns is None else mono_ns
        newest = self._newest
        if newest is None or now_ns - newest.mono_ns > OLDEST_S * 1e9:
            return None
        return newest
