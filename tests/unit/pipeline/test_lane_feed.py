"""LaneFeed: every reader gets the newest lanes, learns what it lost, and makes nobody wait."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.board.board import Identity
from edge_server.errors import DeadlineExceeded, Unavailable
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.lane_feed import LaneFeed, LaneReader

WAIT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def frame(frame_id: int, camera: str = "front") -> LaneFrame:
    return LaneFrame(camera, frame_id, 0, 1, 1, 1280, 720, "lane_detection")


def feed_of(clock: Clock | None = None) -> LaneFeed:
    return LaneFeed(Identity("truck-7", "1", "boot", "client"), clock or Clock())


def taken(reader: LaneReader) -> list[tuple[str, int, int]]:
    """Camera, frame and lost of all that waits."""
    found = []
    while (each := reader.take(timeout_s=0)) is not None:
        found.append((each.message.frame.camera, each.message.frame.frame_id, each.lost))
    return found


def test_a_slow_reader_gets_the_newest_and_the_number_of_lost_ones() -> None:
    feed = feed_of()
    quick, slow = feed.open(), feed.open()
    for number in range(4):
        feed(frame(number))
        assert taken(quick) == [("front", number, 0)]
    assert taken(slow) == [("front", 3, 3)]
    feed(frame(4))
    assert taken(slow) == [("front", 4, 0)], "losses are counted once"


def test_a_reader_holds_a_camera_until_it_has_taken_its_lanes_or_is_over() -> None:
    clock = Clock()
    feed = feed_of(clock)
    assert not feed.holds("front")
    reader, other = feed.open(window=1), feed.open(["rear"])
    feed(frame(0))
    assert feed.holds("front")
    assert not feed.holds("rear")
    reader.take(0)
    assert not feed.holds("front")
    feed(frame(1))
    # One that does not acknowledge holds it for no longer than it may.
    assert feed.holds("front")
    clock.now_s = 61.0
    assert not feed.holds("front")
    with pytest.raises(DeadlineExceeded):
        reader.take(0)
    feed(frame(2, "rear"))
    assert feed.holds("rear")
    feed.close(other)
    assert not feed.holds("rear")


def test_a_fast_camera_does_not_starve_another() -> None:
    feed = feed_of()
    reader = feed.open()
    feed(frame(0, "fast"))
    feed(frame(0, "slow"))
    feed(frame(1, "fast"))
    first, second = reader.take(0), reader.take(0)
    assert first is not None
    assert second is not None
    assert (first.message.frame.camera, second.message.frame.camera) == ("fast", "slow")
    feed(frame(1, "slow"))
    feed(frame(2, "fast"))
    feed(frame(2, "slow"))
    assert [camera for camera, _, _ in taken(reader)] == ["slow", "fast"]


def test_a_reader_gets_its_cameras_alone_and_begins_with_their_newest_lanes() -> None:
    feed = feed_of()
    for camera in ("front", "rear"):
        feed(frame(7, camera))
    reader = feed.open(["rear"])
    feed(frame(8, "front"))
    assert taken(reader) == [("rear", 7, 0)]
    assert feed.newest("front").frame.frame_id == 8
    feed.forget("front")
    assert feed.newest("front") is None


def test_no_more_than_the_window_is_on_its_way() -> None:
    feed = feed_of()
    reader = feed.open(window=2)
    numbers = []
    for number in range(5):
        feed(frame(number))
        numbers += taken(reader)
    assert numbers == [("front", 0, 0), ("front", 1, 0)]
    assert reader.acknowledge(1)
    assert taken(reader) == [("front", 4, 2)]
    assert not reader.acknowledge(4), "three were taken"
    assert reader.acknowledge(3)


def test_a_reader_that_acknowledges_no_more_ends_when_its_window_is_used_up() -> None:
    feed = feed_of()
    reader = feed.open(window=1)
    reader.acknowledge_no_more()
    feed(frame(0))
    assert taken(reader) == [("front", 0, 0)]
    feed(frame(1))
    assert reader.take() is None, "without a time limit: it has ended"


@pytest.mark.parametrize("error", [None, Unavailable("the daemon stops")])
def test_the_end_wakes_a_reader(error: Unavailable | None) -> None:
    reader = feed_of().open()
    ended: list[object] = []

    def read() -> None:
        try:
            ended.append(reader.take())
        except Unavailable as raised:
            ended.append(raised)

    thread = threading.Thread(target=read)
    thread.start()
    reader.end(error)
    thread.join(WAIT_S)
    assert ended == [error]


def test_a_closed_reader_costs_nothing_more() -> None:
    feed = feed_of()
    reader = feed.open()
    feed.close(reader)
    feed(frame(0))
    assert reader.take() is None


@given(
    st.lists(st.floats(0.02, 0.05), min_size=30, max_size=120),
    st.sampled_from([1.0, 7.0, 10.0, 30.0, 100.0]),
)
def test_a_rate_is_kept_whatever_the_jitter_and_loses_nothing(
    gaps: list[float], max_hz: float
) -> None:
    clock = Clock()
    feed = feed_of(clock)
    reader = feed.open(max_hz=max_hz)
    given_at = []
    for number, gap_s in enumerate(gaps):
        clock.now_s += gap_s
        feed(frame(number))
        for _, _, lost in taken(reader):
            assert lost == 0
            given_at.append(clock.now_s)
    for index, start_s in enumerate(given_at):
        for count, end_s in enumerate(given_at[index:]):
            assert count <= (end_s - start_s) * max_hz + 1.5
    # And it is used, as far as frames come: at most one frame's gap late each time.
    assert len(given_at) >= (sum(gaps) - 0.05) / (1 / max_hz + 0.05)


def test_a_reader_that_acknowledges_nothing_for_a_minute_gives_up_its_place() -> None:
    clock = Clock()
    feed = feed_of(clock)
    silent, careful, unbounded = feed.open(window=2), feed.open(window=2), feed.open()
    for number in range(2):
        feed(frame(number))
        for reader in (silent, careful, unbounded):
            assert reader.take(0) is not None
    feed(frame(2))  # from now on both windows are found full
    clock.now_s = 59.0
    assert careful.acknowledge(2)
    feed(frame(3))
    assert silent.take(0) is None
    clock.now_s = 60.5
    feed(frame(4))
    with pytest.raises(DeadlineExceeded, match="2 responses were not acknowledged for 60 s"):
        silent.take(0)
    assert careful.take(0) is not None
    assert unbounded.take(0) is not None
