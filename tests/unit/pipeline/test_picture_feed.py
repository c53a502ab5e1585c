"""PictureFeed: costs nothing while nobody looks, and no more than its share of processors."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.cameras.frame import Frame
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline import picture_feed
from edge_server.pipeline.picture_feed import (
    PROCESSOR_SHARE,
    SENDING_S,
    SIZES,
    PictureFeed,
    Sight,
    SizeName,
    Viewer,
)
from edge_server.pixels import Image

PICTURE = Image.of_bgr(np.zeros((4, 4, 3), np.uint8))


class Bench:
    """A feed whose encoder takes `encoding_s` of a clock that only the test moves."""

    def __init__(self, processors: int = 1000) -> None:
        self.now_s = 100.0
        self.spent_s = 0.0
        self.encoding_s = 0.001
        self.encoded: list[tuple[str, int, int]] = []
        self.rung = 0
        self.fault: Exception | None = None
        self.feed = PictureFeed(
            self.encode,
            processors=processors,
            now_s=lambda: self.now_s,
            spent_s=lambda: self.spent_s,
        )

    def encode(self, sight: Sight, width: int) -> bytes:
        if self.fault is not None:
            raise self.fault
        self.spent_s += self.encoding_s
        frame = sight.lane_frame
        self.encoded.append((frame.camera, frame.frame_id, width))
        return f"{frame.camera} {frame.frame_id} {width}".encode()

    def viewer(self, **sizes: SizeName) -> Viewer:
        def ring() -> None:
            self.rung += 1

        viewer = self.feed.open(ring)
        viewer.look_at(sizes)
        return viewer

    def give(self, camera: str, number: int) -> None:
        lane_frame = LaneFrame(camera, number, 0, 1, 1, 4, 4, "lane_detection")
        self.feed(lane_frame, Frame.arrived(number, PICTURE))

    def tick(self) -> None:
        self.feed.tick(self.now_s)

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


def test_without_viewers_no_frame_is_kept_and_none_is_encoded() -> None:
    bench = Bench()
    bench.give("front", 0)
    viewer = bench.viewer(front="large")
    bench.feed.close(viewer)
    bench.give("front", 1)
    assert bench.encoded == []
    assert bench.feed._waiting == {}


def test_the_last_viewer_takes_the_waiting_frame_along() -> None:
    bench = Bench()
    viewer = bench.viewer(front="large")
    bench.give("front", 0)
    bench.feed.close(viewer)
    assert bench.feed._waiting == {}


def test_a_camera_at_which_nobody_looks_is_not_encoded() -> None:
    bench = Bench()
    viewer = bench.viewer(front="large")
    bench.give("rear", 0)
    bench.give("front", 0)
    bench.tick()
    assert bench.encoded == [("front", 0, SIZES["large"].width)]
    assert viewer.take() == b"front 0 960"


def test_two_viewers_of_one_size_share_a_picture_and_another_size_is_made_beside_it() -> None:
    bench = Bench()
    viewers = [
        bench.viewer(front="large"),
        bench.viewer(front="large"),
        bench.viewer(front="small"),
    ]
    bench.give("front", 0)
    bench.tick()
    assert bench.encoded == [("front", 0, 960), ("front", 0, 320)]
    assert [viewer.take() for viewer in viewers] == [b"front 0 960", b"front 0 960", b"front 0 320"]
    assert bench.rung == 3


def test_the_newest_frame_wins_while_the_encoder_is_busy() -> None:
    bench = Bench()
    viewer = bench.viewer(front="large")
    for number in range(5):
        bench.give("front", number)
    bench.tick()
    assert viewer.take() == b"front 4 960"


def test_nothing_is_made_for_a_viewer_that_does_not_acknowledge() -> None:
    bench = Bench()
    asleep, awake = bench.viewer(front="large"), bench.viewer(front="large")
    for number in range(4):
        bench.give("front", number)
        if bench.feed._waiting:
            bench.tick()
        assert awake.take() == f"front {number} 960".encode()
        assert awake.acknowledge()
        bench.pass_by(1.0)
    assert asleep.take() == b"front 0 960", "it keeps one picture, and no more are made for it"
    assert asleep.take() is None
    assert asleep.acknowledge()
    assert not asleep.acknowledge(), "an acknowledgement that nothing was sent for is none"


def test_pictures_come_no_faster_than_their_size_has_them() -> None:
    bench = Bench()
    viewer = bench.viewer(front="small")
    for number in range(61):
        bench.give("front", number)
        if bench.feed._waiting:
            bench.tick()
            assert viewer.take() is not None
            viewer.acknowledge()
        bench.pass_by(1 / 30)
    assert len(bench.encoded) in (10, 11), "five a second for two seconds"


def test_the_encoder_rests_so_that_it_takes_its_share_alone() -> None:
    bench = Bench(processors=2)
    viewer = bench.viewer(a="large", b="large")
    waited: list[float] = []
    bench.feed.worker.wait = waited.append
    bench.give("a", 0)
    bench.give("b", 0)
    bench.tick()
    bench.tick()
    assert len(bench.encoded) == 1
    assert waited == [pytest.approx((0.001 + SENDING_S) / (2 * PROCESSOR_SHARE))]
    bench.pass_by(waited[0])
    bench.tick()
    assert len(bench.encoded) == 2
    assert viewer.take() == b"a 0 960", "the camera that waited longest comes first"


def test_an_overloaded_encoder_still_gives_a_picture_a_second() -> None:
    bench = Bench(processors=1)
    viewer = bench.viewer(a="large")
    bench.encoding_s = 3.0  # 300 s by its share of the processor
    bench.give("a", 0)
    bench.tick()
    assert len(bench.encoded) == 1
    viewer.take()
    assert viewer.acknowledge()
    bench.pass_by(1.0)
    bench.give("a", 1)
    bench.tick()
    assert len(bench.encoded) == 2


def test_what_many_pages_take_to_send_counts_too() -> None:
    bench = Bench(processors=2)
    waited: list[float] = []
    bench.feed.worker.wait = waited.append
    for _ in range(15):
        bench.viewer(front="large")
    bench.give("front", 0)
    bench.tick()
    bench.tick()
    assert len(bench.encoded) == 1
    assert waited == [pytest.approx((0.001 + 15 * SENDING_S) / (2 * PROCESSOR_SHARE))]


def test_a_picture_that_cannot_be_made_costs_that_picture_alone() -> None:
    bench = Bench()
    viewer = bench.viewer(front="large")
    bench.fault = ValueError("a picture of no known format")
    bench.give("front", 0)
    bench.tick()
    assert viewer.take() is None
    bench.fault = None
    bench.give("front", 1)
    bench.tick()
    assert viewer.take() == b"front 1 960"


def test_who_looks_away_gets_nothing_more_of_that_camera() -> None:
    bench = Bench()
    viewer = bench.viewer(front="large", rear="small")
    bench.give("front", 0)
    bench.tick()
    viewer.look_at({"rear": "large"})
    assert viewer.take() is None
    bench.pass_by(0.001)
    bench.give("front", 1)
    bench.give("rear", 1)
    bench.tick()
    assert viewer.take() == b"rear 1 960"


def test_a_stop_waits_for_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_feed, "_LOOK_S", 600.0)
    feed = Bench().feed
    feed.worker.start()
    feed.stop()
    assert not feed.worker.alive
