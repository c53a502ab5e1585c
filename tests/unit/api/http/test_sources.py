"""Latencies are counted in buckets; the kernel gives the board's numbers, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.api.http.sources import LaneLatency, ProcessorUse
from edge_server.board.resources import BoardMemory
from edge_server.lanes.types import LaneFrame, StageLatency
from edge_server.process.histogram import FRAME_BOUNDS_S

if TYPE_CHECKING:
    from pathlib import Path


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


def write_stat(root: Path, busy: int, idle: int, iowait: int = 0) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {idle} {iowait} 0 0 0 99 99\ncpu0 1 2\n")


def test_utilization_is_the_busy_share_since_the_last_call(tmp_path: Path) -> None:
    write_stat(tmp_path, busy=100, idle=1000)
    use = ProcessorUse(tmp_path)
    write_stat(tmp_path, busy=125, idle=1050, iowait=25)
    assert use.utilization() == pytest.approx(0.25)
    assert use.utilization() == 0.0


def test_memory_is_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n"
    )
    assert ProcessorUse(tmp_path).memory() == BoardMemory(1_024_000, 409_600)


@pytest.mark.parametrize("text", [None, "", "nothing here", "MemTotal: x kB"])
def test_a_value_that_the_kernel_does_not_report_is_none(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "proc").mkdir()
    if text is not None:
        for name in ("stat", "meminfo"):
            (tmp_path / "proc" / name).write_text(text)
    use = ProcessorUse(tmp_path)
    assert use.utilization() is None
    assert use.memory().total_bytes is None
