"""A reader whose every step a test takes, and a camera on it with a clock that the test moves."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import numpy as np

from edge_server.cameras.camera import Camera, DriverCall
from edge_server.cameras.frame import Frame
from edge_server.cameras.source import SourceKind
from edge_server.errors import SourceError
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.frame import CaptureClock, FrameSource
    from edge_server.cameras.source_uri import SourceOptions, SourceUri

IMAGE = Image.of_bgr(np.zeros((4, 6, 3), np.uint8))
PERIOD_S = 1 / 30
START_S = 1000.0


class ScriptedReader:
    """Does by itself nothing of what `Reader` does; the test takes the steps of its thread."""

    def __init__(
        self,
        name: str,
        open_source: Callable[[], FrameSource],
        on_frame: Callable[[ScriptedReader, Frame], None],
        on_end: Callable[[ScriptedReader, Exception | None], None],
        on_done: Callable[[], None],
        *,
        source: FrameSource | None,
        clock: Callable[[], float],
    ) -> None:
        del name, open_source, source
        self.call: DriverCall | None = None
        self.leaving = self.done = False
        self.corrupt = 0
        self._on_frame, self._on_end, self._on_done = on_frame, on_end, on_done
        self._clock = clock

    def start(self) -> None:
        self.calls("open")

    def leave(self) -> None:
        self.leaving = True

    def stop(self, timeout_s: float) -> None:
        del timeout_s
        self.leave()

    def calls(self, name: Literal["open", "read", "close"]) -> None:
        self.call = DriverCall(name, self._clock())

    def reads(self, frame: Frame) -> None:
        """Its read returns `frame`, and the next one begins."""
        self._on_frame(self, frame)
        self.calls("read")

    def fails(self, error: Exception | None) -> None:
        self.leaving = True
        self._on_end(self, error)
        self.calls("close")

    def closes(self) -> None:
        self.leaving = self.done = True
        self.call = None
        self._on_done()


class ScriptedDevice:
    """The source is there, or away, as the test says."""

    def __init__(self) -> None:
        self.there = True
        self.looks = 0

    def look(self, _uri: SourceUri) -> Future[bool]:
        self.looks += 1
        found: Future[bool] = Future()
        found.set_result(self.there)
        return found


class Rig:
    """A camera on scripted readers; time moves only in `advance`."""

    def __init__(
        self,
        *,
        live: bool = True,
        retry_first_s: float = 0.2,
        device: ScriptedDevice | None = None,
        library: Future[object] | None = None,
    ) -> None:
        self.now = START_S
        self.readers: list[ScriptedReader] = []
        self.opened = 0

        def reader(*arguments: object, **more: object) -> ScriptedReader:
            made = ScriptedReader(*arguments, **more)
            self.readers.append(made)
            return made

        look = None if device is None else device.look
        kinds = {"scripted": SourceKind(self._open, live, look=look, library=lambda _: library)}
        self.camera = Camera(
            "front",
            "scripted://it",
            kinds=kinds,
            retry_first_s=retry_first_s,
            clock=lambda: self.now,
            reader=reader,
        )
        if not live:
            self.camera.open()

    def _open(self, _uri: SourceUri, _options: SourceOptions) -> FrameSource:
        self.opened += 1
        return None

    @property
    def reader(self) -> ScriptedReader:
        """The latest one."""
        return self.readers[-1]

    def advance(self, seconds: float) -> None:
        """Let time pass, with a check whenever one is due."""
        until = self.now + seconds
        while True:
            due_s = self.camera.supervise(self.now)
            if self.now + due_s > until:
                break
            self.now += max(due_s, 0.01)
        self.now = until
        self.camera.supervise(self.now)

    def frame(
        self,
        image: Image = IMAGE,
        *,
        age_s: float = 0.0,
        clock: CaptureClock = "arrival",
    ) -> None:
        """The latest reader reads a frame that was captured `age_s` ago."""
        capture_ns = round((self.now - age_s) * 1e9)
        self.reader.reads(Frame(0, image, capture_ns, capture_ns, clock))

    def play(self, frames: int = 10, period_s: float = PERIOD_S, **more: object) -> None:
        """Frames come at their rate; the time of the next one has come when it returns."""
        for _ in range(frames):
            self.frame(**more)
            self.advance(period_s)

    def go_live(self, frames: int = 10) -> None:
        self.advance(0.0)
        self.reader.calls("read")
        self.play(frames)

    def lose(self, reason: str = "lost", text: str = "cable out") -> None:
        self.reader.fails(SourceError(text, reason=reason))
        self.reader.closes()
