"""A candidate's lanes are judged by those that are served: equal ones pass, worse ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.lanes.agreement import LaneAgreement, LaneVerdict
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.types import Lane

SIZE = (1280, 720)
LENS = Lens("pinhole", *SIZE, 1000.0, 1000.0, 640.0, 360.0, (0.0,) * 5)
CAMERA = CameraModel(LENS, Mounting(1.5))
ROWS = np.linspace(700, 390, 31)


def lanes(shift_px: float, generator: np.random.Generator, noise_px: float = 1.0) -> list[Lane]:
    """Two boundaries of a straight lane, as a network sees them in one frame."""
    made = []
    for side in (-1, 1):
        x = 640 + side * 1.2 * (ROWS - 360) + shift_px + generator.normal(0, noise_px)
        points = np.stack([x, ROWS], axis=1).astype(np.float32)
        made.append(Lane(points, 0.9, id=2 + side, index=side))
    return made


def judged(
    seed: int,
    frames: int = 700,
    *,
    missed: float = 0.0,
    extra: float = 0.0,
    noise_px: float = 1.0,
    off_px: float = 0.0,
    failed: float = 0.0,
    slower_us: int = 0,
) -> LaneVerdict:
    """The verdict on a candidate with these faults, in shares of frames and px of a picture."""
    generator = np.random.default_rng(seed)
    agreement = LaneAgreement()
    shift = 0.0
    for number in range(frames):
        shift = 0.95 * shift + generator.normal(0, 2)
        if generator.random() < failed:
            agreement.fail()
            continue
        candidate = lanes(shift + off_px, generator, noise_px)
        if generator.random() < missed:
            candidate = candidate[1:]
        if generator.random() < extra:
            candidate += lanes(400, generator)[:1]
        agreement.add(
            lanes(shift, generator),
            candidate,
            number * 300_000_000,
            size=SIZE,
            candidate_us=20_000 + slower_us,
            served_us=20_000,
            camera=CAMERA,
        )
    return agreement.verdict()


@pytest.mark.parametrize("seed", range(3))
def test_an_equal_candidate_is_good(seed: int) -> None:
    verdict = judged(seed)
    assert verdict.outcome == "good", verdict.text
    assert all(each.low <= each.value <= each.high for each in verdict.measures)
    (near, middle, far) = verdict.lateral_m
    assert (near[0], middle[0], far[0]) == (10.0, 20.0, 40.0)
    # A pixel is 1 cm at 10 m, and 4 cm at 40 m.
    assert near[1] == pytest.approx(0.011, abs=0.004)
    assert far[1] == pytest.approx(0.045, abs=0.015)


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        ({"missed": 0.5}, "missed lines"),
        ({"extra": 0.9}, "extra lines"),
        ({"noise_px": 12.0}, "jitter"),
        ({"off_px": 14.0}, "distance"),
        ({"failed": 0.2}, "failed frames"),
        ({"slower_us": 60_000}, "time"),
    ],
)
def test_a_worse_candidate_is_worse_and_the_text_names_the_measure(
    faults: dict[str, float], named: str
) -> None:
    verdict = judged(7, 300, **faults)
    assert verdict.outcome == "worse", verdict.text
    assert named in verdict.text


def test_few_frames_give_no_verdict() -> None:
    assert judged(1, frames=40).outcome == "watching"
    assert LaneAgreement().verdict().outcome == "watching"


def test_lines_that_are_only_predicted_do_not_count() -> None:
    agreement = LaneAgreement()
    served = [Lane(each.points, 0.9, predicted=True) for each in lanes(0, np.random.default_rng(1))]
    agreement.add(served, [], 0, size=SIZE, candidate_us=1, served_us=1)
    missed = next(each for each in agreement.verdict().measures if each.name == "missed lines")
    assert missed.value == 0


def test_a_disagreement_is_noted_once_a_minute_and_twenty_times() -> None:
    generator = np.random.default_rng(1)
    agreement = LaneAgreement()

    def add(at_s: float, candidate: list[Lane]) -> int:
        agreement.add(
            lanes(0, generator),
            candidate,
            round(at_s * 1e9),
            size=SIZE,
            candidate_us=20_000,
            served_us=20_000,
        )
        return 0 if agreement.disagreement is None else agreement.disagreement.number

    assert [add(second, lanes(0, generator)) for second in range(10)] == [0] * 10
    # One line of two in each of five frames is not more than half.
    assert [add(10 + second, lanes(0, generator)[:1]) for second in range(10)] == [0] * 10
    assert [add(20 + second, []) for second in range(5)] == [1] * 5
    assert agreement.disagreement is not None
    assert agreement.disagreement.text == ("6 of 10 lines in 5 frames are of one model alone")
    assert add(79, []) == 1
    assert [add(60 * minute, []) for minute in range(2, 40)] == [*range(2, 21), *[20] * 19]
