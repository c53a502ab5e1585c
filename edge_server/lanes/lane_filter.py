"""LaneFilter: one lane boundary on the ground over time, a Kalman filter of its polynomial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_server.lanes.types import Polynomial

if TYPE_CHECKING:
    from numpy.typing import NDArray

# 99 % of the chi-squared distribution with four degrees of freedom: a detection that differs more
# is an outlier and counts for less.
_GATE = 13.3
# At these shares of the detected range polynomials are compared.
_SAMPLES = np.linspace(0.0, 1.0, 4)
# Standard deviations of what a detection's covariance does not know, at 0 m and for each metre
# ahead: paint is 0.1 to 0.2 m wide.
_FLOOR_M, _FLOOR_PER_M = 0.05, 0.003
# Standard deviations of c0..c3 before anything was measured: half a lane, 15 degrees, a bend of
# 65 m radius, and its change within 50 m.
_PRIOR = np.array([2.0, 0.25, 0.015, 1e-4])
# Growth of the standard deviations of c0..c3 in one second: with speed and yaw rate known, and
# without, where steering within the lane is all that limits them.
_GROWTH_KNOWN = np.array([0.10, 0.010, 1.2e-3, 2e-5])
_GROWTH_UNKNOWN = np.array([0.35, 0.040, 2.5e-3, 4e-5])


@dataclass(frozen=True)
class Motion:
    """The vehicle's motion between two frames; None where it is not known.

    Attributes:
        speed_mps: m/s, positive forward.
        yaw_rate_radps: rad/s, positive turns to the left.
    """

    speed_mps: float | None = None
    yaw_rate_radps: float | None = None


class LaneFilter:
    """The polynomial of one boundary, moved by the vehicle's motion, corrected by detections.

    Args:
        first: the first detection; the prior only bounds what it leaves open.

    Attributes:
        mean: (4,) float64, c0..c3; see `Polynomial`.
        covariance: (4, 4) float64.
        x_min_m, x_max_m: the range that is still ahead of what was last detected.
    """

    def __init__(self, first: Polynomial) -> None:
        self.mean: NDArray[np.float64] = first.coefficients.astype(np.float64)
        self.covariance: NDArray[np.float64] = np.diag(_PRIOR**2)
        self.correct(first)

    @property
    def polynomial(self) -> Polynomial:
        """The estimate."""
        return Polynomial(self.mean, self.covariance, self.x_min_m, self.x_max_m)

    def at(self, x_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (N,) y in m at (N,) `x_m`."""
        return _powers(x_m) @ self.mean

    def distance_m(self, detection: Polynomial) -> float:
        """Return the mean distance to `detection`, in m, where both hold; over the nearer half of
        the detection where they hardly overlap."""
        first = detection.x_min_m
        last = max(min(detection.x_max_m, self.x_max_m), (first + detection.x_max_m) / 2)
        x_m = first + _SAMPLES * (last - first)
        return float(np.abs(_powers(x_m) @ (self.mean - detection.coefficients)).mean())

    def predict(self, passed_s: float, motion: Motion) -> None:
        """Move the polynomial into the vehicle's axes `passed_s` later."""
        ahead_m = (motion.speed_mps or 0.0) * passed_s
        turned_rad = (motion.yaw_rate_radps or 0.0) * passed_s
        step = np.array(
            [
                [1.0, ahead_m, ahead_m**2, ahead_m**3],
                [0.0, 1.0, 2 * ahead_m, 3 * ahead_m**2],
                [0.0, 0.0, 1.0, 3 * ahead_m],
                [0.0, 0.0, 0.0, 1.0],
            ]
        )
        self.mean = step @ self.mean
        # On its way ahead the vehicle had turned by half on average.
        self.mean[0] -= turned_rad * ahead_m / 2
        self.mean[1] -= turned_rad
        known = motion.speed_mps is not None and motion.yaw_rate_radps is not None
        growth = _GROWTH_KNOWN if known else _GROWTH_UNKNOWN
        self.covariance = step @ self.covariance @ step.T + np.diag(growth**2 * passed_s)
        self.x_max_m -= ahead_m

    def correct(self, detection: Polynomial) -> None:
        """Correct the estimate by a detection."""
        x_m = detection.x_min_m + _SAMPLES * (detection.x_max_m - detection.x_min_m)
        powers = _powers(x_m)
        difference = powers @ (detection.coefficients - self.mean)
        measured = np.einsum("ij,jk,ik->i", powers, detection.covariance, powers)
        noise = np.diag(measured + (_FLOOR_M + _FLOOR_PER_M * x_m) ** 2)
        expected = powers @ self.covariance @ powers.T
        surprise = float(difference @ np.linalg.solve(expected + noise, difference))
        noise *= max(1.0, surprise / _GATE)
        gain = np.linalg.solve(expected + noise, powers @ self.covariance).T
        self.mean = self.mean + gain @ difference
        # Joseph's form stays symmetric and positive.
        rest = np.eye(4) - gain @ powers
        self.covariance = rest @ self.covariance @ rest.T + gain @ noise @ gain.T
        self.x_min_m, self.x_max_m = detection.x_min_m, detection.x_max_m


def _powers(x_m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N, 4): 1, x, x^2, x^3."""
    return np.vander(x_m, 4, increasing=True)
