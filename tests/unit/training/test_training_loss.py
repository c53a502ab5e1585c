"""What a partial label teaches, and what it leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from types import ModuleType

torch = pytest.importorskip("torch", reason="training alone needs PyTorch")
TRAINING = Path(__file__).parents[3] / "training"


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TRAINING))
    import lane_training.loss as module

    return module


def targets(loss: ModuleType, weights: tuple[float, ...], **known: bool) -> Any:
    """Upright lines at x = 200, 400 and 550 of one image."""
    x = np.full((1, 5, 72), np.nan, np.float32)
    for place, at in enumerate((200, 400, 550)):
        x[0, place, :50] = at
    weight = np.zeros((1, 5), np.float32)
    weight[0, : len(weights)] = weights
    flags = {name: torch.tensor([known.get(name, False)]) for name in ("complete", "own_lane")}
    nowhere = torch.full((1, 2), float("nan"))
    return loss.Targets(
        torch.from_numpy(x), torch.from_numpy(weight), vanishing_px=nowhere, **flags
    )


def upright(x_px: float) -> Any:
    """One anchor that stands upright from the lower edge."""
    anchor = torch.zeros(1, 77)
    anchor[0, 5:] = x_px
    return anchor


@pytest.mark.parametrize(
    ("x_px", "complete", "partial", "own_lane"),
    [
        (205, "lane", "lane", "lane"),
        (240, "none", "none", "none"),
        (300, "none", "open", "none"),
        (90, "none", "open", "open"),
        (640, "none", "open", "open"),
        (550, "lane", "open", "open"),
    ],
)
def test_an_anchor_learns_what_the_label_knows(
    loss: ModuleType, x_px: float, complete: str, partial: str, own_lane: str
) -> None:
    whole, some = (1.0, 1.0, 1.0), (1.0, 1.0, 0.0)
    for expected, weights, known in (
        (complete, whole, {"complete": True}),
        (partial, some, {}),
        (own_lane, some, {"own_lane": True}),
    ):
        match = loss.assign(upright(x_px), targets(loss, weights, **known))
        learnt = "lane" if len(match.anchor) else "none" if match.negative[0, 0] else "open"
        assert learnt == expected


def test_nobody_knows_what_is_at_an_uncertain_line(loss: ModuleType) -> None:
    match = loss.assign(upright(550), targets(loss, (1.0, 1.0, 0.0), complete=True))
    assert not len(match.anchor)
    assert not match.negative.any()


def test_a_partial_label_may_end_too_low(loss: ModuleType) -> None:
    anchor = upright(200)
    raw = torch.zeros(1, 1, 75)
    costs = {}
    for rows in (30, 50, 70):
        raw[0, 0, 2] = rows / 10
        for complete in (True, False):
            label = targets(loss, (1.0, 1.0, 0.0), complete=complete)
            costs[rows, complete] = loss.lane_loss(raw, anchor, label)[1]["length"]
    assert costs[50, True] == costs[50, False] == costs[70, False] == 0
    assert costs[30, True] == costs[30, False] > 0
    assert costs[70, True] > 0
