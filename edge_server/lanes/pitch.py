"""The pitch of the camera against its calibration: of one moment, and of a minute."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_server.lanes.road_geometry import PitchMeasurement

# A vehicle leans by this much on its springs and over the road's waves, and swings back so fast.
# Braking is 1 to 2 degrees.
_SPRINGS_STD_RAD = math.radians(0.7)
_SPRINGS_S = 1.5
# What is left over on a straight, even road, beside the noise of the points.
_ROAD_STD_RAD = math.radians(0.1)
# A measurement that is farther off is of lines that part, no pitch.
_LARGEST_GAP_STD = 4.0
_LONGEST_STEP_S = 1.0

# Drift is the median of a minute's samples on straight road: braking, crests and slip roads are
# shorter than half of it.
DRIFT_RAD = math.radians(0.5)
_DRIFT_OVER_RAD = math.radians(0.4)
_STRAIGHT_CURVATURE = 1 / 1000
_SAMPLE_PERIOD_S = 0.5
_SAMPLES = 120
# Samples of straight road between bends count together.
_OLDEST_SAMPLE_S = 300.0


class PitchFilter:
    """Estimates by how much the camera looks down further than calibrated, frame by frame.

    A Kalman filter of one state that returns to zero where nothing is measured. Not thread-safe.

    Attributes:
        rad: positive nose down.
        std_rad: its standard deviation.

    Args:
        calibrated_std_rad: of the calibration's own pitch.
    """

    def __init__(self, calibrated_std_rad: float) -> None:
        self._resting = _SPRINGS_STD_RAD**2 + calibrated_std_rad**2
        self._variance = self._resting
        self._at_ns: int | None = None
        self.rad = 0.0

    @property
    def std_rad(self) -> float:
        return math.sqrt(self._variance)

    def predict(self, mono_ns: int) -> None:
        """Go on to the capture of the next frame, CLOCK_MONOTONIC, before it is located."""
        step_s = _LONGEST_STEP_S if self._at_ns is None else (mono_ns - self._at_ns) / 1e9
        self._at_ns = mono_ns
        keep = math.exp(-min(max(step_s, 0.0), _LONGEST_STEP_S) / _SPRINGS_S)
        self.rad *= keep
        self._variance = keep**2 * self._variance + (1.0 - keep**2) * self._resting

    def correct(self, measured: PitchMeasurement) -> None:
        """Take in what the frame shows, which was located with `rad`: the difference to it."""
        noise = measured.std_rad**2 + _ROAD_STD_RAD**2
        total = self._variance + noise
        if measured.rad**2 > _LARGEST_GAP_STD**2 * total:
            return
        gain = self._variance / total
        self.rad += gain * measured.rad
        self._variance *= 1.0 - gain


class PitchDrift:
    """Notices that the calibrated pitch has not been right for a minute of straight road.

    Not thread-safe.

    Attributes:
        rad: the median of the last minute where that is a drift, positive nose down; else None.
    """

    def __init__(self) -> None:
        self.rad: float | None = None
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def add(self, pitch_rad: float, curvature_1pm: float | None, mono_ns: int) -> None:
        """Take in one frame's pitch against the calibration; frames in bends are left out.

        Args:
            pitch_rad: positive nose down.
            curvature_1pm: of the road; None where it is not known.
            mono_ns: CLOCK_MONOTONIC of the capture.
        """
        if curvature_1pm is None or abs(curvature_1pm) > _STRAIGHT_CURVATURE:
            return
        samples = self._samples
        if samples and mono_ns - samples[-1][0] < _SAMPLE_PERIOD_S * 1e9:
            return
        samples.append((mono_ns, pitch_rad))
        while mono_ns - samples[0][0] > _OLDEST_SAMPLE_S * 1e9:
            samples.popleft()
        if len(samples) < _SAMPLES:
            return
        median = statistics.median(pitch for _, pitch in samples)
        threshold = DRIFT_RAD if self.rad is None else _DRIFT_OVER_RAD
        self.rad = median if abs(median) > threshold else None
