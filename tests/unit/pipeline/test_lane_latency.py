"""LaneLatency counts the latencies of lanes in buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_server.lanes.types import LaneFrame, StageLatency
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.process.histogram import FRAME_BOUNDS_S


def lane_frame(capture_ns: int = 0, **stages: int) -> LaneFrame:
    spent = {"queue": 0, "preprocess": 0, "infer": 0, "postprocess": 0, **stages}
    return LaneFrame(
        camera="front",
        frame_id=1,
        dropped=0,
        capture_mono_ns=capture_ns,
        capture_epoch_ns=0,
        width=1,
        height=1,
        model_name="m",
        model_version="1",
        latency_us=StageLatency(**spent),
        lanes=(),
    )


NO_FRAME: Any = None


def test_a_stage_is_counted_in_each_bucket_that_is_long_enough() -> None:
    latency = LaneLatency(lambda: 0)
    latency(lane_frame(infer=20_000), NO_FRAME)  # exactly a bound: at most so long
    latency(lane_frame(infer=700_000), NO_FRAME)
    found = latency.stages()["front", "infer"]
    at = dict(zip(FRAME_BOUNDS_S, found.at_most, strict=False))
    assert (at[0.01], at[0.02], at[0.5], found.at_most[-1]) == (0, 1, 1, 2)
    assert found.total == 0.72


def test_end_to_end_is_the_age_when_the_lanes_are_known() -> None:
    latency = LaneLatency(lambda: 50_000_000)
    latency(lane_frame(capture_ns=10_000_000), NO_FRAME)
    assert latency.end_to_end()["front",].total == 0.04


def test_only_lanes_that_are_not_stale_count_as_the_newest_valid_ones() -> None:
    now_ns = [1_000_000_000]
    latency = LaneLatency(lambda: now_ns[0])
    assert latency.last_valid_age_s("front") is None
    latency(lane_frame(capture_ns=900_000_000), NO_FRAME)
    now_ns[0] = 3_000_000_000
    latency(lane_frame(capture_ns=1_000_000_000), NO_FRAME)  # 2 s old: stale
    latency(replace(lane_frame(capture_ns=now_ns[0]), failure="no answer"), NO_FRAME)
    assert latency.last_valid_age_s("front") == 2.0
    latency.forget("front")
    assert latency.last_valid_age_s("front") is None


@given(st.lists(st.integers(0, 2_000_000), max_size=50))
def test_buckets_never_shrink_and_the_last_holds_all(spent_us: list[int]) -> None:
    latency = LaneLatency(lambda: 0)
    for us in spent_us:
        latency(lane_frame(queue=us), NO_FRAME)
    for found in latency.stages().values():
        assert list(found.at_most) == sorted(found.at_most)
        assert found.at_most[-1] == len(spent_us)


def test_a_frame_that_the_model_failed_at_counts_nowhere() -> None:
    latency = LaneLatency(lambda: 0)
    latency(replace(lane_frame(), failure="broken"), NO_FRAME)
    assert not latency.stages()
    assert not latency.end_to_end()
