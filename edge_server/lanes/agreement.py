"""LaneAgreement: how far the lanes of a candidate agree with those that are served, and whether
that is enough. Pure numpy, for one thread.

There is no truth on the road: the lanes that are served stand for it. A candidate that finds more
than them, or better ones, does not pass for that reason, and labels say more.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.lanes.camera_model import CameraModel
    from edge_server.lanes.types import Lane

Outcome = Literal["watching", "good", "worse"]

# Of so many frames at most, the newest ones.
_MOST_FRAMES = 3000
_FEWEST_FRAMES = 200
# Frames that follow each other look alike: so many count as one.
_ALIKE = 5
_QUANTILE = 2.58  # 99 %
# One line, as TuSimple has it: 20 px of 1280.
_SAME_LINE = 20 / 1280
_RANGES_M = (10.0, 20.0, 40.0)
_ROWS = 24
_LONGEST_STEP_NS = 1_000_000_000
# The two disagree where half of the lines in so many frames are of one of them alone. So many are
# noted, and one a minute at most: a bad candidate disagrees all the time.
_APART_FRAMES, _APART = 5, 0.5
_MOST_NOTED, _NOTED_EVERY_NS = 20, 60_000_000_000


class Measure(NamedTuple):
    """One comparison: its value with the interval in which it is, to 99 %, and what may be."""

    name: str
    value: float
    low: float
    high: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


class LaneVerdict(NamedTuple):
    """What the frames so far say.

    Attributes:
        outcome: `worse` once a measure is beyond its limit for certain, `good` once all are below
            theirs for certain.
        text: why.
        lateral_m: mean distance of matched lines by range, m; empty without a calibration.
    """

    outcome: Outcome
    text: str
    frames: int
    measures: tuple[Measure, ...]
    lateral_m: tuple[tuple[float, float], ...]


class Disagreement(NamedTuple):
    """That the candidate sees another road than the model that serves, just now.

    Attributes:
        number: counts those of this comparison.
        text: of how many lines.
    """

    number: int
    text: str


class _Compared(NamedTuple):
    lines: int
    missed: int
    extra: int
    off: tuple[float, ...]
    lateral_m: tuple[tuple[float, float], ...]
    steps: tuple[tuple[float, float], ...]
    candidate_us: int
    served_us: int


class LaneAgreement:
    """Compares frame by frame; frames come in their order.

    Attributes:
        disagreement: the last one that was noted.
    """

    def __init__(self) -> None:
        self.disagreement: Disagreement | None = None
        self._note_from_ns: int | None = None
        self._frames: deque[_Compared | None] = deque(maxlen=_MOST_FRAMES)
        self._before: dict[tuple[str, int], tuple[int, float, float]] = {}

    def fail(self) -> None:
        """Note that the candidate gave no lanes for a frame."""
        self._frames.append(None)

    def add(
        self,
        served: Sequence[Lane],
        candidate: Sequence[Lane],
        mono_ns: int,
        *,
        size: tuple[int, int],
        candidate_us: int,
        served_us: int,
        camera: CameraModel | None = None,
    ) -> None:
        """Compare the lanes of one frame.

        Args:
            served: as they were given; those that a tracker only predicts do not count.
            size: of the picture, px.
            candidate_us, served_us: what the models took.
            camera: of a calibrated camera, for pictures of that size.
        """
        width, height = size
        served = [lane for lane in served if not lane.predicted]
        off, lateral, steps = [], [], []
        free = list(candidate)
        before, self._before = self._before, {}
        for line in served:
            found = [(_off(line.points, each.points), each) for each in free]
            distance, match = min(found, key=lambda each: each[0], default=(np.inf, None))
            if match is None or distance > _SAME_LINE * width:
                continue
            free = [each for each in free if each is not match]
            off.append(distance / width)
            if camera is not None:
                lateral += _lateral(line.points, match.points, camera)
            name = ("id", line.id) if line.id else ("index", line.index)
            at = _at(line.points, 0.75 * height), _at(match.points, 0.75 * height)
            self._before[name] = (mono_ns, *at)
            if name in before and mono_ns - before[name][0] <= _LONGEST_STEP_NS:
                steps.append((at[0] - before[name][1], at[1] - before[name][2]))
        missed = len(served) - len(off)
        self._frames.append(
            _Compared(
                len(served),
                missed,
                len(free),
                tuple(off),
                tuple(lateral),
                tuple(steps),
                candidate_us,
                served_us,
            )
        )
        self._note_disagreement(mono_ns)

    def _note_disagreement(self, mono_ns: int) -> None:
        newest = [e for e in islice(reversed(self._frames), _APART_FRAMES) if e is not None]
        lines = sum(each.lines + each.extra for each in newest)
        apart = sum(each.missed + each.extra for each in newest)
        number = 1 if self.disagreement is None else self.disagreement.number + 1
        if (
            len(newest) == _APART_FRAMES
            and apart > _APART * lines
            and number <= _MOST_NOTED
            and (self._note_from_ns is None or mono_ns >= self._note_from_ns)
        ):
            text = f"{apart} of {lines} lines in {_APART_FRAMES} frames are of one model alone"
            self.disagreement = Disagreement(number, text)
            self._note_from_ns = mono_ns + _NOTED_EVERY_NS

    def verdict(self) -> LaneVerdict:
        """Return what all frames together say."""
        frames = [each for each in self._frames if each is not None]
        failed = len(self._frames) - len(frames)
        measures = [_share("failed frames", failed, len(self._frames), 0.05)]
        lines = sum(each.lines for each in frames)
        measures.append(_share("missed lines", sum(e.missed for e in frames), lines, 0.10))
        measures.append(_share("extra lines", sum(e.extra for e in frames), lines, 0.08))
        off = np.array([each for frame in frames for each in frame.off])
        measures.append(_mean("distance, of the width", off, 8 / 1280))
        steps = np.array([each for frame in frames for each in frame.steps]).reshape(-1, 2)
        measures.append(_ratio("jitter, of the served", steps, 1.5))
        times = np.array([(e.candidate_us, e.served_us) for e in frames]).reshape(-1, 2)
        if len(times):
            new, old = np.median(times, axis=0)
            slower = float(new / max(1.0, 2 * old + 5000))
            measures.append(Measure("time, of twice the served", slower, slower, slower, 1.0))
        by_range = [
            (at, float(np.mean(found)))
            for at in _RANGES_M
            if (found := [d for e in frames for x, d in e.lateral_m if x == at])
        ]
        outcome, text = self._outcome(measures)
        return LaneVerdict(outcome, text, len(self._frames), tuple(measures), tuple(by_range))

    def _outcome(self, measures: Sequence[Measure]) -> tuple[Outcome, str]:
        count = len(self._frames)
        if count >= _FEWEST_FRAMES / 4 and (worse := [m for m in measures if m.low > m.limit]):
            which = "; ".join(f"{each}, {each.limit:g} may be" for each in worse)
            return "worse", f"in {count} frames: {which}"
        if unclear := [m for m in measures if not m.high < m.limit]:
            return "watching", f"after {count} frames not clear: {unclear[0]}"
        if count < _FEWEST_FRAMES:
            return "watching", f"{count} of {_FEWEST_FRAMES} frames"
        return "good", f"in {count} frames: {'; '.join(map(str, measures))}"


def _at(points: NDArray[np.float32], row: float) -> float:
    """Return the x of a line at a row; of its nearer end where it does not reach there."""
    return float(np.interp(row, points[::-1, 1], points[::-1, 0]))


def _off(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Return the mean distance of two lines along shared rows, px; infinite without such rows."""
    top = max(first[-1, 1], second[-1, 1])
    bottom = min(first[0, 1], second[0, 1])
    if bottom <= top:
        return float("inf")
    rows = np.linspace(top, bottom, _ROWS)
    x = [np.interp(rows, each[::-1, 1], each[::-1, 0]) for each in (first, second)]
    return float(np.abs(x[0] - x[1]).mean())


def _lateral(
    first: NDArray[np.float32], second: NDArray[np.float32], camera: CameraModel
) -> list[tuple[float, float]]:
    """Return (x, distance) in m at those of the ranges that both lines reach."""
    sides = []
    for points in (first, second):
        ground = camera.ground_of_rays(camera.lens.rays_of(points)).points
        ground = ground[np.isfinite(ground[:, 0])]
        ground = ground[np.argsort(ground[:, 0])]
        if len(ground) < 2:
            return []
        x, y = ground.T
        sides.append(np.interp(np.array(_RANGES_M), x, y, left=np.nan, right=np.nan))
    apart = np.abs(sides[0] - sides[1])
    known = np.flatnonzero(np.isfinite(apart)).tolist()
    return [(_RANGES_M[row], float(apart[row])) for row in known]


def _share(name: str, count: int, of: int, limit: float) -> Measure:
    """A share with Wilson's interval."""
    if not of:
        return Measure(name, 0.0, 0.0, 1.0, limit)
    share, n, z2 = count / of, of / _ALIKE, _QUANTILE**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _QUANTILE * sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Measure(name, share, max(0.0, middle - half), middle + half, limit)


def _mean(name: str, values: NDArray[np.float64], limit: float) -> Measure:
    if len(values) < 2 * _ALIKE:
        return Measure(name, 0.0, 0.0, 1.0, limit)
    value = float(values.mean())
    half = _QUANTILE * float(values.std()) / sqrt(len(values) / _ALIKE)
    return Measure(name, value, max(0.0, value - half), value + half, limit)


def _ratio(name: str, steps: NDArray[np.float64], limit: float) -> Measure:
    """How much larger the candidate's steps between frames are than the served lines' own."""
    if len(steps) < 2 * _ALIKE:
        return Measure(name, 1.0, 0.0, 10.0, limit)
    # The 80th percentile is 1.28 deviations; what the served lines jump seldom does not show in it.
    # A pixel is noise in either.
    served, candidate = np.sqrt((np.quantile(np.abs(steps), 0.8, axis=0) / 1.28) ** 2 + 1.0)
    value = float(candidate / served)
    half = 1.26 * _QUANTILE * sqrt(_ALIKE / len(steps))
    return Measure(name, value, exp(log(value) - half), exp(log(value) + half), limit)
