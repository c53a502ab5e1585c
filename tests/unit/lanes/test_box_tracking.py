"""Boxes of one object keep their number."""

from __future__ import annotations

import numpy as np

from edge_server.lanes.box_tracking import BoxTracker

CAR, SIGN = 0, 1
MS = 1_000_000


def update(tracker: BoxTracker, at_ms: int, *objects: tuple[int, float, float]) -> list[int]:
    """The numbers of boxes of 100 px, each of a class, at x and y."""
    boxes = np.array([[x, y, x + 100, y + 100] for _, x, y in objects]).reshape(-1, 4)
    classes = np.array([each[0] for each in objects], np.int64)
    return tracker.update(boxes, classes, at_ms * MS).tolist()


def test_objects_keep_their_numbers_whatever_their_order() -> None:
    tracker = BoxTracker()
    assert update(tracker, 0, (CAR, 0, 0), (CAR, 300, 0)) == [1, 2]
    assert update(tracker, 33, (CAR, 310, 5), (CAR, 20, 0)) == [2, 1]


def test_the_larger_overlap_comes_first_and_a_track_has_one_box() -> None:
    tracker = BoxTracker()
    update(tracker, 0, (CAR, 0, 0))
    assert update(tracker, 33, (CAR, 40, 0), (CAR, 5, 0)) == [2, 1]


def test_another_class_is_another_object() -> None:
    tracker = BoxTracker()
    update(tracker, 0, (CAR, 0, 0))
    assert update(tracker, 33, (SIGN, 0, 0)) == [2]


def test_a_track_outlives_a_second_without_its_box() -> None:
    tracker = BoxTracker()
    update(tracker, 0, (CAR, 0, 0))
    assert update(tracker, 500) == []
    assert update(tracker, 1000, (CAR, 0, 0)) == [1]
    assert update(tracker, 2001, (CAR, 0, 0)) == [2]
