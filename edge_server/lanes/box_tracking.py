"""BoxTracker: the same number for the boxes of one object, from frame to frame. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Two boxes are one object where they share so much of their union.
_SAME_OBJECT = 0.3
_KEPT_NS = 1_000_000_000


class _Track(NamedTuple):
    id: int
    class_id: int
    box: NDArray[np.float64]
    seen_ns: int


class BoxTracker:
    """Continues each track with the box of its class that overlaps it most; the largest overlap
    comes first. A track without a box is forgotten after 1 s. Nothing is predicted: objects that
    move by their own width between two frames get a new number. For one thread; frames come in
    their order."""

    def __init__(self) -> None:
        self._tracks: list[_Track] = []
        self._newest = 0

    def update(
        self, boxes: NDArray[np.float64], classes: NDArray[np.int64], mono_ns: int
    ) -> NDArray[np.int64]:
        """Return the numbers of the tracks, from 1.

        Args:
            boxes: (N, 4) x_min, y_min, x_max, y_max, of the frame that was captured at `mono_ns`.
            classes: (N,).
        """
        before = [each for each in self._tracks if mono_ns - each.seen_ns <= _KEPT_NS]
        ids = np.zeros(len(boxes), np.int64)
        if before and len(boxes):
            shared = _overlaps(boxes, np.stack([each.box for each in before]))
            shared[classes[:, None] != [each.class_id for each in before]] = 0.0
            while np.max(shared) >= _SAME_OBJECT:
                row, column = np.unravel_index(np.argmax(shared), shared.shape)
                ids[row] = before[int(column)].id
                shared[row], shared[:, column] = 0.0, 0.0
        for row in np.flatnonzero(ids == 0):
            self._newest += 1
            ids[row] = self._newest
        continued = set(ids.tolist())
        self._tracks = [each for each in before if each.id not in continued] + [
            _Track(int(id_), int(class_id), box, mono_ns)
            for id_, class_id, box in zip(ids, classes, boxes, strict=True)
        ]
        return ids


def _overlaps(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N, M), the share of the union that two boxes have in common."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    common = np.clip(high - low, 0.0, None).prod(axis=2)
    areas = [(each[:, 2:] - each[:, :2]).prod(axis=1) for each in (first, second)]
    shared: NDArray[np.float64] = common / (areas[0][:, None] + areas[1][None] - common)
    return shared
