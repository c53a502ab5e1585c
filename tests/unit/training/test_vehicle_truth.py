"""Boxes of rendered vehicles and the drivable area are where the renderer draws them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from lane_training.vehicles import INPUT_PX, LABELS, sample, truth_of

from edge_server.tools.road.scene import DrawnVehicle, RoadScene
from edge_server.tools.road.variants import varied

SIZE = 640, 360


def road(*vehicles: DrawnVehicle, conditions: tuple[str, ...] = ()) -> RoadScene:
    scene = varied(RoadScene.for_camera(3), conditions, 3)
    return replace(scene, vehicles=vehicles)


def car(ahead_m: float, height_m: float = 1.5, lane_m: float = 0.0) -> DrawnVehicle:
    return DrawnVehicle(lane_m, ahead_m, 0.0, 1.9, height_m, (10.0, 10.0, 200.0))


def test_a_vehicle_is_a_box_of_its_class_and_no_drivable_area() -> None:
    near, far = car(20.0), car(60.0, 3.2, -3.6)
    truth = truth_of(road(near, far), 0.0, *SIZE)
    assert [LABELS[each] for each in truth.classes] == ["car", "lorry"]
    for x_min, y_min, x_max, y_max in truth.boxes.round().astype(int):
        middle = (x_min + x_max) // 2
        assert not truth.drivable[(y_min + y_max) // 2, middle]
        assert truth.drivable[y_max + 2, middle]
    # As wide as it is at its distance, and its side beside that.
    (x_min, _, x_max, _), width = truth.boxes[0], SIZE[0]
    rear_px = 1.9 / 20.0 * RoadScene.for_camera(3).camera.focal * width
    assert rear_px - 1 <= x_max - x_min <= 1.3 * rear_px


def test_what_is_hidden_or_small_is_neither_vehicle_nor_background() -> None:
    truth = truth_of(road(car(20.0, 3.0), car(40.0), car(280.0, lane_m=-3.6)), 0.0, *SIZE)
    assert truth.classes.tolist() == [1, -1, -1]
    assert len(truth_of(road(car(2.0)), 0.0, *SIZE).boxes) == 0


def test_the_own_bonnet_is_not_drivable() -> None:
    lowest = [
        truth_of(road(conditions=names), 0.0, *SIZE).drivable[-1] for names in ((), ("bonnet",))
    ]
    middle = SIZE[0] // 2
    assert [bool(row[middle]) for row in lowest] == [True, False]


def test_a_sample_is_repeatable_and_has_the_networks_size() -> None:
    first, again = sample(11), sample(11)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.bgr.shape == (INPUT_PX[1], INPUT_PX[0], 3)
    assert first.drivable.shape == (48, 80)
    assert 0.05 < first.drivable.mean() < 0.7
