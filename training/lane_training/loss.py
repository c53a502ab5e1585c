"""Which anchor learns which lane, and what it costs to be wrong (LaneATT, with our additions)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from edge_server.lanes.decode import FIRST_X_COLUMN, INPUT_WIDTH_PX, ROW_COUNT, START_Y_COLUMN
from lane_training.anchors import INPUT_HEIGHT_PX
from lane_training.network import LENGTH_SCALE, OFFSET_SCALE_PX

POSITIVE_PX = 15.0
NEGATIVE_PX = 20.0
FORCED_POSITIVE_PX = 40.0
NEAR_MISS_PX = 70.0
IGNORED_LANE_PX = 30.0
FEWEST_ROWS_BETWEEN = 4
FAR_FROM_VANISHING_PX = 70.0
# An anchor that starts above this share of a lane sees too little of it to stand for it.
LATEST_START_SHARE = 0.6
# Every fourth row is enough to tell anchors apart; no lane reaches above row 56 (y < 76 px).
MATCH_ROWS = slice(0, 57, 4)
FOCAL_POSITIVE, FOCAL_NEGATIVE = 0.25, 0.75
CLASS_WEIGHT, LENGTH_WEIGHT = 10.0, 0.3
UNREACHABLE_PX = 1e5


@dataclass(frozen=True)
class Targets:
    """Labels of one batch.

    Attributes:
        x_px: (B, L, 72) x of every lane below its top, extended past the image border; NaN above.
        lane_weight: (B, L) share of each lane's loss; below 1 for labels of machines, 0 for a lane
            that may be there or not: anchors near it learn nothing.
        complete: (B,) bool; False where lanes may be missing from the label, and may reach higher
            than it says.
        own_lane: (B,) bool; the lanes with a weight are the two of the vehicle's own lane, so that
            there is none between them.
        vanishing_px: (B, 2) x, y of the vanishing point; NaN where it is not known. Used only where
            a label is incomplete.
    """

    x_px: Tensor
    lane_weight: Tensor
    complete: Tensor
    own_lane: Tensor
    vanishing_px: Tensor


@dataclass(frozen=True)
class Assignment:
    """What each anchor is to say.

    Attributes:
        image, anchor, lane: (P,) int64 indices of the positives.
        positives: (B,) int64 number of them in each image.
        negative: (B, 2784) bool.
    """

    image: Tensor
    anchor: Tensor
    lane: Tensor
    positives: Tensor
    negative: Tensor


def _lane_extent(x_px: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and last visible row of each lane and whether it has any, each (B, L)."""
    visible = (x_px >= 0) & (x_px < INPUT_WIDTH_PX)
    rows = torch.arange(ROW_COUNT, device=x_px.device)
    first = torch.where(visible, rows, ROW_COUNT).amin(-1)
    last = torch.where(visible, rows, -1).amax(-1)
    return first, last, last - first >= 2


def _start_rows(anchors: Tensor) -> Tensor:
    return (anchors[:, START_Y_COLUMN] * (ROW_COUNT - 1)).round()


def _match_rows(anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that anchors are compared on, (R,), and the anchors' x on them, (2784, R)."""
    rows = torch.arange(ROW_COUNT, device=anchors.device)[MATCH_ROWS]
    return rows, anchors[:, FIRST_X_COLUMN:][:, MATCH_ROWS]


def _distances(anchors: Tensor, x_px: Tensor) -> Tensor:
    """Mean horizontal distance of every lane to every anchor over the rows both have.

    Returns:
        (B, L, 2784) in pixels, huge for an anchor that cannot stand for the lane.
    """
    first, last, present = _lane_extent(x_px)
    lowest, highest = first[..., None], last[..., None]
    start = _start_rows(anchors)
    rows, anchor_x = _match_rows(anchors)
    from_row = torch.maximum(lowest, start)[..., None]
    common = ((rows >= from_row) & (rows <= highest[..., None])).float()
    lane_x = x_px[:, :, None, MATCH_ROWS].nan_to_num()
    shared = common.sum(-1)
    distance = (anchor_x - lane_x).abs_().mul_(common).sum(-1) / shared.clamp(min=1)
    latest = lowest + LATEST_START_SHARE * (highest - lowest)
    apart = (shared == 0) | (start > latest) | ~present[..., None]
    return distance.masked_fill_(apart, UNREACHABLE_PX)


def _miss_vanishing_point(anchors: Tensor, vanishing_px: Tensor) -> Tensor:
    """(B, 2784) bool: anchors that pass the vanishing point at a distance are no lanes."""
    # Nothing is far from NaN.
    x, y = vanishing_px[:, 0], vanishing_px[:, 1].nan_to_num()
    row = ((1.0 - y / INPUT_HEIGHT_PX) * (ROW_COUNT - 1)).round().long().clamp(0, ROW_COUNT - 1)
    return (anchors[:, FIRST_X_COLUMN:].T[row] - x[:, None]).abs() > FAR_FROM_VANISHING_PX


def _between_own_lines(anchors: Tensor, targets: Targets) -> Tensor:
    """(B, 2784) bool: anchors that stay between the two lines of a labelled own lane."""
    labelled = targets.lane_weight > 0
    known = targets.own_lane & (labelled.sum(1) == 2)
    two = labelled.float().topk(2, dim=1).indices
    lines = targets.x_px.gather(1, two[..., None].expand(-1, -1, ROW_COUNT))
    one, other = lines[:, :, None, MATCH_ROWS].unbind(1)
    rows, x = _match_rows(anchors)
    common = (rows >= _start_rows(anchors)[:, None]) & ~(one + other).isnan()
    outside = common & ((x - one) * (x - other) >= 0)
    return known[:, None] & ~outside.any(-1) & (common.sum(-1) >= FEWEST_ROWS_BETWEEN)


def assign(anchors: Tensor, targets: Targets) -> Assignment:
    """Positives are near a lane, or the nearest to one; negatives are certainly far from all.

    The device is waited for once, to learn how many positives there are.
    """
    distance = _distances(anchors, targets.x_px)
    ignored = targets.lane_weight[..., None] == 0
    near_ignored = (ignored & (distance < IGNORED_LANE_PX)).any(1)
    distance = distance.masked_fill(ignored, UNREACHABLE_PX)
    nearest, nearest_lane = distance.min(dim=1)
    positive = nearest < POSITIVE_PX
    best, best_anchor = distance.min(dim=2)
    for lane in range(distance.shape[1]):
        chosen, there = best_anchor[:, lane, None], best[:, lane, None] < FORCED_POSITIVE_PX
        positive.scatter_(1, chosen, positive.gather(1, chosen) | there)
        nearest_lane.scatter_(1, chosen, torch.where(there, lane, nearest_lane.gather(1, chosen)))

    certain = targets.complete[:, None] | (nearest < NEAR_MISS_PX)
    certain |= _miss_vanishing_point(anchors, targets.vanishing_px)
    certain |= _between_own_lines(anchors, targets)
    positive_image, positive_anchor = torch.nonzero(positive, as_tuple=True)
    return Assignment(
        image=positive_image,
        anchor=positive_anchor,
        lane=nearest_lane[positive_image, positive_anchor],
        positives=positive.sum(1),
        negative=(nearest > NEGATIVE_PX) & certain & ~positive & ~near_ignored,
    )


def _focal(margin: Tensor, weight: float) -> Tensor:
    """Focal loss (gamma 2) of a two-class softmax whose true class leads by `margin`."""
    return weight * torch.sigmoid(-margin) ** 2 * functional.softplus(-margin)


def lane_loss(raw: Tensor, anchors: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the head's raw predictions (B, 2784, 75), and its parts, all on their device."""
    match = assign(anchors, targets)
    batch = len(raw)
    margin = raw[..., 1] - raw[..., 0]
    image, anchor, lane = match.image, match.anchor, match.lane
    positives = match.positives.clamp(min=1)
    negative_cost = (_focal(-margin, FOCAL_NEGATIVE) * match.negative).sum(1)
    weight = targets.lane_weight[image, lane]
    positive_cost = raw.new_zeros(batch).index_add(
        0, image, weight * _focal(margin[image, anchor], FOCAL_POSITIVE)
    )
    classes = ((negative_cost + positive_cost) / positives).mean()

    first, last, _ = _lane_extent(targets.x_px)
    first, last = first[image, lane], last[image, lane]
    chosen = raw[image, anchor]
    x_px = anchors[anchor, FIRST_X_COLUMN:] + OFFSET_SCALE_PX * chosen[:, 3:]
    start = _start_rows(anchors[anchor])
    rows = torch.arange(ROW_COUNT, device=raw.device)
    goal = targets.x_px[image, lane]
    # From the lower of the two starts: decoding extends a lane below its anchor's start.
    valid = (rows >= torch.minimum(first, start)[:, None]) & (rows <= last[:, None]) & ~goal.isnan()
    gap = functional.smooth_l1_loss(
        x_px,
        goal.nan_to_num().clamp(-INPUT_WIDTH_PX, 2 * INPUT_WIDTH_PX),
        reduction="none",
    )
    offset_cost = (gap * valid).sum(1) / valid.sum(1).clamp(min=1)
    length, labelled = LENGTH_SCALE * chosen[:, 2], last - start + 1
    # Where a label may end too low, a longer lane is no mistake.
    labelled = torch.where(targets.complete[image], labelled, labelled.maximum(length.detach()))
    length_cost = functional.smooth_l1_loss(length, labelled, reduction="none")
    share = weight / positives[image] / batch
    offset, length_part = (offset_cost * share).sum(), (length_cost * share).sum()
    total = CLASS_WEIGHT * classes + offset + LENGTH_WEIGHT * length_part
    parts = {"class": classes, "offset": offset, "length": length_part}
    return total, {name: value.detach() for name, value in parts.items()}
