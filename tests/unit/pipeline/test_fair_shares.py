"""Turns at a model: in proportion to priorities, none starves, no more at a time than useful."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.fair_shares import FairShares, frames_at_once, frames_of
from edge_server.requests import StepTiming

if TYPE_CHECKING:
    from edge_server.pipeline.fair_shares import CameraShare

WAIT_S = 30.0


def turns(shares: FairShares, cameras: dict[str, CameraShare], count: int) -> list[str]:
    """Who gets the next turns, where all of `cameras` wait all the time and none has a turn."""
    order = []
    for share in cameras.values():
        shares.take_turn(share, 0.0)
    for _ in range(count):
        (name,) = (name for name, share in cameras.items() if share.has_turn)
        order.append(name)
        shares.end_turn(cameras[name], again=True)
    return order


def test_cameras_of_one_priority_take_turns_in_order_of_arrival() -> None:
    shares = FairShares()
    cameras = {name: shares.share(1) for name in "abc"}
    assert "".join(turns(shares, cameras, 9)) == "abcabcabc"


@given(st.lists(st.integers(1, 10), min_size=2, max_size=8))
def test_cameras_that_always_wait_get_turns_in_proportion_to_their_priorities(
    priorities: list[int],
) -> None:
    shares = FairShares()
    cameras = {str(n): shares.share(priority) for n, priority in enumerate(priorities)}
    count = 20 * sum(priorities)
    got = Counter(turns(shares, cameras, count))
    for n, priority in enumerate(priorities):
        assert got[str(n)] == pytest.approx(20 * priority, abs=2)


def test_a_camera_that_was_away_saves_no_turns_for_later() -> None:
    shares = FairShares()
    busy, rare = shares.share(1), shares.share(1)
    turns(shares, {"busy": busy}, 100)
    shares.end_turn(busy)
    order = turns(shares, {"busy": busy, "rare": rare}, 6)
    assert Counter(order) == {"busy": 3, "rare": 3}


def test_who_leaves_after_a_time_out_keeps_the_place() -> None:
    shares = FairShares()
    first, second, third = (shares.share(1) for _ in range(3))
    assert shares.take_turn(first, 0.0)
    assert not shares.take_turn(second, 0.0)
    assert not shares.take_turn(third, 0.0)
    assert not shares.take_turn(second, 0.0)
    shares.end_turn(first)
    assert (second.has_turn, third.has_turn) == (True, False)
    assert shares.take_turn(second, 0.0)


def test_a_camera_that_goes_gives_its_turn_and_its_place_to_the_others() -> None:
    shares = FairShares()
    first, second, third = (shares.share(1) for _ in range(3))
    for share in (first, second, third):
        shares.take_turn(share, 0.0)
    shares.end_turn(second)  # waited
    shares.end_turn(second)
    shares.end_turn(first)
    assert third.has_turn
    shares.end_turn(third)
    assert shares.take_turn(first, 0.0)


def test_a_turn_that_ends_wakes_the_next_camera() -> None:
    shares = FairShares()
    first, second = shares.share(1), shares.share(1)
    shares.take_turn(first, 0.0)
    got: list[bool] = []
    waiter = threading.Thread(target=lambda: got.append(shares.take_turn(second, WAIT_S)))
    waiter.start()
    shares.end_turn(first)
    waiter.join(WAIT_S)
    assert got == [True]


def test_a_higher_limit_lets_waiting_cameras_begin_and_a_lower_one_ends_no_turn() -> None:
    shares = FairShares()
    cameras = [shares.share(1) for _ in range(3)]
    assert [shares.take_turn(share, 0.0) for share in cameras] == [True, False, False]
    shares.adapt(2.0)
    assert [share.has_turn for share in cameras] == [True, True, False]
    for _ in range(200):
        shares.adapt(1.0)
    assert shares.limit == 1
    shares.end_turn(cameras[0])
    assert not cameras[2].has_turn
    shares.end_turn(cameras[1])
    assert cameras[2].has_turn


def of_two_cameras() -> FairShares:
    shares = FairShares()
    shares.share(1), shares.share(1)
    return shares


def config(name: str, *, count: int = 1, rows: int = 1, batching: bool = False) -> ModelConfig:
    text = (
        f'name: "{name}" max_batch_size: {rows} instance_group {{ kind: KIND_CPU count: {count} }}'
    )
    return ModelConfig.of(
        text_format.Parse(text + " dynamic_batching { }" * batching, pb.ModelConfig())
    )


@pytest.mark.parametrize(
    ("steps", "frames"),
    [
        ([], 1),
        ([(config("one"), 10)], 1),
        ([(config("one"), 0)], 1),
        ([(config("two", count=2), 10)], 2),
        ([(config("pre"), 1), (config("net"), 30)], 1),
        ([(config("pre"), 2), (config("net"), 10), (config("decode"), 2)], 2),
        ([(config("pre"), 10), (config("net"), 10), (config("decode"), 10)], 3),
        ([(config("pre", count=4), 2), (config("net"), 10)], 1),
        ([(config("net", rows=8), 10)], 1),
        ([(config("net", rows=8, batching=True), 10)], 8),
        ([(config("pre"), 1), (config("net", rows=8, batching=True), 40)], 8),
    ],
)
def test_as_many_frames_at_once_as_keep_the_slowest_step_busy(
    steps: list[tuple[ModelConfig, int]], frames: int
) -> None:
    counts = {config.name: frames_of(config) for config, _ in steps}
    timings = [StepTiming(config.name, "any", ms * 1_000_000) for config, ms in steps]
    shares = of_two_cameras()
    shares.adapt(frames_at_once(timings, counts))
    assert shares.limit == frames


def test_a_single_slow_step_changes_nothing() -> None:
    shares = of_two_cameras()
    for useful in (1.2, 1.2, 2.0, 1.2, 1.2):
        shares.adapt(useful)
        assert shares.limit == 1
    for _ in range(200):
        shares.adapt(2.0)
    assert shares.limit == 2
