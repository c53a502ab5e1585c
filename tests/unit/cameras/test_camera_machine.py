"""No order of what sources do wedges a camera, loses its newest frame or delivers one twice."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.scripted_camera import Rig

from edge_server.cameras.camera import MOST_ABANDONED
from edge_server.cameras.frame import Frame
from edge_server.cameras.status import CameraState
from edge_server.errors import SourceError
from edge_server.pixels import Image, PixelFormat

WHOLE = Image(PixelFormat.NV12, (np.zeros((4, 6), np.uint8), np.zeros((2, 6), np.uint8)))
TORN = Image(PixelFormat.NV12, (np.zeros((4, 6), np.uint8), np.zeros((1, 6), np.uint8)))


class Sources(RuleBasedStateMachine):
    """A camera whose readers do anything that drivers do, in any order, and hang anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.taken: list[int] = []
        self.images: dict[int, Image] = {}
        self.advance(0.0)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.04, 0.2, 0.4, 1.1, 3.0, 11.0]))
    def advance(self, seconds: float) -> None:
        self.rig.advance(seconds)

    @rule(
        back=st.integers(0, 2),
        age_s=st.sampled_from([0.0, 0.0, 0.02, 0.7]),
        torn=st.booleans(),
        clock=st.sampled_from(["arrival", "rtp", "sensor"]),
    )
    def frame(self, back: int, age_s: float, torn: bool, clock: str) -> None:
        """Of the present reader, or of one that was left behind."""
        readers = self.rig.readers
        reader = readers[-1 - back % len(readers)]
        if reader.done:
            return
        was_read = reader is readers[-1] and not reader.leaving
        capture_ns = round((self.rig.now - age_s) * 1e9)
        number = self.rig.camera.captured
        frame = Frame(0, TORN if torn else WHOLE, capture_ns, capture_ns, clock)
        reader.reads(frame)
        newest = self.rig.camera.newest
        if newest is not None and newest.id == number:
            assert was_read
            assert not torn

    @rule()
    def well_behaved_frame_of_a_live_camera_is_the_newest(self) -> None:
        reader = self.rig.reader
        if reader.done or reader.leaving:
            return
        self.rig.advance(0.02)
        number, before = self.rig.camera.captured, self.rig.camera.status
        self.rig.frame(WHOLE)
        if before.state is CameraState.LIVE and not reader.leaving:
            newest = self.rig.camera.newest
            assert newest is not None
            assert newest.id == number

    @rule(back=st.integers(0, 2), reason=st.sampled_from(["lost", "stalled", "corrupt", ""]))
    def fail(self, back: int, reason: str) -> None:
        readers = self.rig.readers
        reader = readers[-1 - back % len(readers)]
        if not (reader.done or reader.leaving):
            reader.fails(SourceError("gone", reason=reason) if reason else None)

    @rule(back=st.integers(0, 2))
    def close(self, back: int) -> None:
        """A reader that was left gets its call back."""
        readers = self.rig.readers
        reader = readers[-1 - back % len(readers)]
        if reader.leaving and not reader.done:
            reader.closes()

    @rule()
    def take(self) -> None:
        frame = self.rig.camera.next_frame(0)
        if frame is not None:
            self.taken.append(frame.id)
            assert frame.image is WHOLE
            assert self.rig.camera.next_frame(0) is None

    @invariant()
    def every_frame_is_taken_dropped_or_waits(self) -> None:
        camera = self.rig.camera
        waits = camera.newest is not None
        assert len(self.taken) + camera.dropped + waits == camera.captured
        assert self.taken == sorted(set(self.taken))

    @invariant()
    def no_more_readers_hang_than_a_camera_may_keep(self) -> None:
        left = sum(reader.leaving and not reader.done for reader in self.rig.readers[:-1])
        assert left <= MOST_ABANDONED

    @invariant()
    def a_state_that_is_not_well_has_a_reason(self) -> None:
        status = self.rig.camera.status
        assert bool(status.reason) == (status.state is not CameraState.LIVE)

    def teardown(self) -> None:
        """Once every driver returns and the source is well, the camera is live within seconds."""
        rig = self.rig
        for _ in range(3):
            for reader in rig.readers:
                if reader.leaving and not reader.done:
                    reader.closes()
            rig.advance(5.1)
            if rig.reader.leaving:
                continue
            rig.reader.calls("read")
            rig.play(70)
        assert rig.camera.status.state is CameraState.LIVE
        assert rig.camera.next_frame(0) is not None


TestSources = Sources.TestCase
