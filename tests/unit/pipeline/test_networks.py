"""Several networks on one camera: one frame for all of them, and lanes that wait for none."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.waiting import TIMEOUT_S, wait_until
from unit.pipeline.given_lanes import OF_ANY_AGE_MS, GivenLanes, data_plane
from unit.pipeline.test_pipeline import OneCamera

from edge_server.board.board import Identity
from edge_server.cameras import colour
from edge_server.cameras.frame import Frame
from edge_server.cameras.status import CameraState
from edge_server.errors import InternalError, SettingsError, Unavailable
from edge_server.pipeline import messages
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_feed import LaneFeed
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.networks import NetworkPipeline
from edge_server.pipeline.perception import Detections
from edge_server.pixels import Image, PixelFormat
from edge_server.settings import NetworkSection
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.backends.contract import Tensors
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.perception import NetworkFrame

SSD = (
    'output { name: "boxes" data_type: TYPE_FP32 dims: [-1, 4] } '
    'output { name: "scores" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "classes" data_type: TYPE_FP32 dims: -1 } '
)


class GivenBoxes:
    """Gives one box for any image, and keeps which arrays it saw; stops at `gate`."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.box = [0.25, 0.25, 0.5, 0.5]
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()

    def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.seen.append(inputs["image"].array.ctypes.data)
        assert self.gate.wait(TIMEOUT_S)
        if self.broken:
            raise InternalError("broken")
        return {
            "boxes": Tensor(np.array([[self.box]], np.float32)),
            "scores": Tensor(np.array([[0.9]], np.float32)),
            "classes": Tensor(np.array([[0]], np.float32)),
        }


class Given:
    """A lane pipeline with so many networks, whose loops the test runs itself."""

    def __init__(
        self,
        *sections: NetworkSection,
        dims: str = "[-1, -1, 3]",
        lane_model: str = "lane_detection",
    ) -> None:
        self.models = {f"net{n}": GivenBoxes() for n in range(len(sections))}
        networks = {name: (SSD, each.run) for name, each in self.models.items()}
        plane = data_plane(GivenLanes(), dims=dims, networks=networks)
        self.found: list[NetworkFrame] = []
        self.lanes: list[LaneFrame] = []
        shares = FairShares()
        self.networks = [
            NetworkPipeline("front", f"n{n}", each, plane, [self.found.append], shares=shares)
            for n, each in enumerate(sections)
        ]
        self.camera = OneCamera()
        self.pipeline = LanePipeline(
            self.camera,
            plane,
            lane_model,
            [lambda lane_frame, _: self.lanes.append(lane_frame)],
            networks=self.networks,
            max_age_ms=OF_ANY_AGE_MS,
        )

    def give(self, *frames: Frame) -> None:
        self.camera._frames += frames
        for _ in frames:
            self.pipeline.tick(time.monotonic())


def of(number: int, **section: Any) -> NetworkSection:
    """On a busy machine a frame is old when its turn comes."""
    return NetworkSection(f"net{number}", **{"deadline_ms": 10_000, **section})


def nv12(number: int) -> Frame:
    return Frame.arrived(number, Image.grey(PixelFormat.NV12, 1280, 720))


def test_results_of_a_frame_can_be_joined_with_its_lanes() -> None:
    given = Given(of(0), of(1))
    given.give(nv12(41))
    for network in given.networks:
        network.tick(0.0)
    (lanes,) = given.lanes
    assert [each.network for each in given.found] == ["n0", "n1"]
    for found in given.found:
        assert (found.camera, found.frame_id) == (lanes.camera, lanes.frame_id)
        assert found.capture_mono_ns == lanes.capture_mono_ns
        assert (found.model_name, found.task) == (f"net{found.network[1:]}", "detection")
        assert isinstance(found.result, Detections)
        np.testing.assert_allclose(found.result.boxes, [[320, 180, 640, 360]])


def test_a_camera_without_a_lane_model_gives_its_frames_to_its_networks() -> None:
    given = Given(of(0), lane_model="")
    given.pipeline.validate()
    given.camera.become(CameraState.DEGRADED, "dark", "it is dark")
    old = nv12(41)
    old = Frame(41, old.image, old.capture_mono_ns - 400_000_000, 0)  # older than lanes may be
    given.give(old)
    given.networks[0].tick(0.0)
    (found,) = given.found
    assert (found.frame_id, found.failure, found.degraded[0].code) == (41, "", "dark")
    (seen,) = given.lanes
    assert (seen.frame_id, seen.model_name, seen.lanes, seen.failure) == (41, "", (), "")
    assert given.pipeline.fault == ("dark", "it is dark")
    given.camera.become(CameraState.LOST, "lost", "unplugged")
    given.pipeline.tick(10.0)
    given.networks[0].tick(0.0)
    assert given.found[-1].failure_reason == "lost"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_frame_is_converted_once_for_all_networks(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    made: list[PixelFormat] = []
    converted = colour.converted

    def counted(image: Image, pixel_format: PixelFormat) -> Image | None:
        made.append(pixel_format)
        return converted(image, pixel_format)

    monkeypatch.setattr(colour, "converted", counted)
    given = Given(*[of(n) for n in range(count)])
    for number in range(3):
        given.give(nv12(number))
        for network in given.networks:
            network.tick(0.0)
    assert made == [PixelFormat.BGR] * 3
    # The very same pixels, for each of three frames.
    assert len({tuple(each.seen) for each in given.models.values()}) == 1
    assert len(given.found) == 3 * count


def test_a_recording_in_lockstep_waits_for_its_networks() -> None:
    given = Given(of(0))
    given.camera.lockstep = True
    given.give(nv12(0), nv12(1))
    assert [each.frame_id for each in given.lanes] == [0]
    given.networks[0].tick(0.0)
    given.pipeline.tick(0.0)
    given.networks[0].tick(0.0)
    assert [each.frame_id for each in given.found] == [0, 1]


def test_lanes_wait_for_no_network() -> None:
    given = Given(of(0))
    slow = given.models["net0"]
    slow.gate.clear()
    (network,) = given.networks
    network.worker.start()
    try:
        given.give(nv12(0))
        wait_until(lambda: slow.seen)
        given.give(nv12(1), nv12(2), nv12(3))
        assert [each.frame_id for each in given.lanes] == [0, 1, 2, 3]
        slow.gate.set()
        wait_until(lambda: len(given.found) == 2)
    finally:
        slow.gate.set()
        network.worker.stop()
    # The newest one wins; the two that it replaced are counted.
    assert [each.frame_id for each in given.found] == [0, 3]
    assert given.found[-1].dropped == 2


def test_networks_run_one_at_a_time_and_in_proportion_to_their_priorities() -> None:
    given = Given(of(0, priority=3), of(1))
    turns: list[str] = []
    shares = given.networks[0]._shares
    for _ in range(40):
        given.give(nv12(0))
        for network in given.networks:
            shares.take_turn(network._share, 0.0)
        (running,) = [each for each in given.networks if each._share.has_turn]
        turns.append(running.name)
        running._share.cost = 0.2 / running.section.priority
        shares.end_turn(running._share, again=True)
    assert turns.count("n0") == pytest.approx(30, abs=2)


def test_an_old_frame_is_not_given_to_the_network_and_an_old_result_is_stale() -> None:
    given = Given(of(0))
    (network,) = given.networks
    given.give(nv12(0))
    lanes, frame = network._waiting
    assert frame is not None
    old = Frame(0, frame.image, frame.capture_mono_ns - 60 * 10**9, 0, inputs=frame.inputs)
    network(lanes, old)
    network.tick(0.0)
    assert (given.found, network.missed["late"], network.missed["dropped"]) == ([], 1, 1)
    assert re.match(r"late: its frames are \d{5} ms old", network.failure)
    given.give(nv12(1))
    network.tick(0.0)
    (found,) = given.found
    message = messages.frame_payload(
        found, Identity("d", "0", "b", "c"), 0, found.capture_mono_ns + 20 * 10**9
    )
    assert b'"status":"FRAME_STATUS_STALE"' in message
    assert network.failure == ""


def test_a_response_that_breaks_the_contract_is_counted_and_published_as_invalid() -> None:
    given = Given(of(0))
    (network,) = given.networks
    given.models["net0"].box = [2.0, 2.0, 3.0, 3.0]
    given.give(nv12(0))
    network.tick(0.0)
    (found,) = given.found
    assert (found.result, network.frames, network.missed["outside"]) == (None, 0, 1)
    assert found.failure == network.failure
    assert found.failure.startswith("outside: a box is 2560, 1440")
    given.models["net0"].broken = True
    given.give(nv12(1))
    network.tick(0.0)
    assert network.missed["failed"] == 1
    given.models["net0"].broken = False
    given.models["net0"].box = [0.1, 0.1, 0.2, 0.2]
    given.give(nv12(2))
    network.tick(0.0)
    assert (network.failure, network.frames) == ("", 1)


def test_a_network_may_take_fewer_frames_than_the_camera_gives() -> None:
    given = Given(of(0, max_hz=0.01))
    for number in range(5):
        given.give(nv12(number))
        given.networks[0].tick(0.0)
    assert [each.frame_id for each in given.found] == [0]
    assert not given.networks[0].missed["dropped"]


def test_why_a_camera_gives_no_frames_reaches_readers_of_its_networks() -> None:
    given = Given(of(0))
    given.camera.become(CameraState.LOST, "lost", "unplugged")
    given.pipeline.tick(10.0)
    given.networks[0].tick(0.0)
    (found,) = given.found
    assert (found.failure_reason, found.failure, found.task) == ("lost", "unplugged", "tensors")


def test_boxes_are_tracked_where_the_settings_want_it() -> None:
    given = Given(of(0, track=True), of(1))
    for number in range(2):
        given.give(nv12(number))
        for network in given.networks:
            network.tick(0.0)
    ids = [each.result.ids for each in given.found if isinstance(each.result, Detections)]
    assert [None if each is None else each.tolist() for each in ids] == [[1], None, [1], None]


def test_nothing_is_published_where_results_are_counted_alone() -> None:
    given = Given(of(0, publish=False))
    given.give(nv12(0))
    given.networks[0].tick(0.0)
    assert (given.found, given.networks[0].frames) == ([], 1)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (NetworkSection("missing"), "unknown model: 'missing' is not found"),
        (of(0, region="0,0,64,64"), "cannot be shown a region: it needs image_preprocess"),
    ],
)
def test_a_network_that_cannot_run_says_why(section: NetworkSection, why: str) -> None:
    given = Given(of(0))
    network = NetworkPipeline(
        "front", "n", section, given.networks[0].model._data_plane, [], shares=FairShares()
    )
    with pytest.raises(
        (SettingsError, Unavailable), match=rf"cameras\.front\.networks\.n: .*{why}"
    ):
        network.validate(live=True)


def test_a_stream_of_networks_has_their_messages() -> None:
    given = Given(of(0))
    feed = LaneFeed(Identity("d", "0", "b", "c"))
    reader = feed.open(["front/n0"])
    given.give(nv12(7))
    given.networks[0].tick(0.0)
    feed(given.found[0])
    delivery = reader.take(0.0)
    assert delivery is not None
    message = delivery.message.sent_at(time.monotonic_ns())
    assert (message.schema, message.network, message.frame_id) == ("edge.perception/1", "n0", 7)
    (detection,) = message.detections
    assert (detection.box.x_min, detection.box.y_max) == (320, 360)
    feed.forget("front")
    assert feed.newest("front/n0") is None


LANES = (
    'output { name: "lane_points" data_type: TYPE_FP32 dims: [-1, 72, 2] } '
    'output { name: "lane_scores" data_type: TYPE_FP32 dims: -1 } '
)


class RoadLanes(GivenLanes):
    """Two lines of a straight road."""

    def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        made = super().run(inputs, outputs)
        rows = np.linspace(89, 40, 72)
        lines = [np.stack([80 + side * (rows - 30), rows], axis=1) for side in (-1, 1)]
        return {**made, "lane_points": Tensor(np.array([lines], np.float32))}


def shadow(
    run: Any, frames: int, recorder: Any = None
) -> tuple[NetworkPipeline, Any, list[NetworkFrame]]:
    """A shadow that saw so many frames, its model's counts, and what it published."""
    plane = data_plane(RoadLanes(), networks={"candidate": (LANES, run)})
    found: list[NetworkFrame] = []
    section = NetworkSection("candidate", shadow_of="lanes", deadline_ms=10_000)
    network = NetworkPipeline(
        "front",
        "new",
        section,
        plane,
        [found.append],
        shares=FairShares(),
        served="lane_detection",
        recorder=recorder,
    )
    camera = OneCamera()
    pipeline = LanePipeline(
        camera, plane, "lane_detection", [], networks=[network], max_age_ms=OF_ANY_AGE_MS
    )
    network.validate(live=False)
    for number in range(frames):
        camera._frames.append(Frame.arrived(number, Image.of_bgr(np.zeros((90, 160, 3), np.uint8))))
        network._due_s = 0.0
        pipeline.tick(0.0)
        network.tick(0.0)
    with plane.lease() as snapshot:
        return network, snapshot.find("candidate").statistics.counts(), found


def test_a_shadow_publishes_nothing_and_gets_a_verdict() -> None:
    network, counts, found = shadow(RoadLanes().run, 700)
    assert found == []
    assert network.verdict is not None
    assert network.verdict.outcome == "good", network.verdict.text
    # Only the grey frame counts: a comparison is no request of anybody.
    assert counts.success.count == 1


def test_a_shadow_that_misses_lines_is_worse() -> None:
    def blind(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        return {
            "lane_points": Tensor(np.zeros((1, 0, 72, 2), np.float32)),
            "lane_scores": Tensor(np.zeros((1, 0), np.float32)),
        }

    recorded: list[NetworkFrame] = []
    network, _, found = shadow(blind, 100, recorded.append)
    assert network.verdict is not None
    # What it saw is recorded with the frames, and nowhere else.
    assert (len(recorded), found) == (100, [])
    assert network.disagreement is not None
    assert network.disagreement.number == 1
    assert network.verdict.outcome == "worse"
    assert "missed lines 1" in network.verdict.text


def test_a_shadow_rests_nine_times_as_long_as_it_ran() -> None:
    began_s: list[float] = []

    def slow(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        began_s.append(time.monotonic())
        while time.monotonic() < began_s[-1] + 0.3:
            pass
        return RoadLanes().run(inputs, outputs)

    network, _, _ = shadow(slow, 1)
    assert network._due_s - began_s[-1] >= 10 * 0.3
    given = Given()
    given.give(nv12(3))
    network(given.lanes[0], nv12(3))
    assert network._waiting is None


def test_what_gives_no_lanes_is_no_shadow_of_them() -> None:
    given = Given(of(0, shadow_of="lanes"))
    with pytest.raises(SettingsError, match=r"networks\.n0\.shadow_of: model 'net0' gives detect"):
        given.networks[0].validate(live=False)
