"""Cameras that end with a test."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from support.live_cameras.clip import Clip, jpegs, write_road
from support.live_cameras.mjpeg import MjpegCamera
from support.live_cameras.network import (
    DroppingPort,
    LossyRelay,
    RedirectingPort,
    SilentPort,
    TcpProxy,
)
from support.live_cameras.rtsp import RtspCamera, Stream, what_is_missing

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path


class LiveCameras:
    """Makes cameras and what stands between them and a reader; closes them with the test.

    Args:
        folder: for the clips.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def clip(self, width: int = 640, height: int = 360) -> Clip:
        return write_road(self._folder, width, height)

    def rtsp(self, clip: Clip | None = None, **stream: Any) -> RtspCamera:
        """Start a camera with RTSP; `stream` has the fields of `Stream`."""
        missing = no_rtsp_camera()
        if missing:
            pytest.skip(missing)
        return self._stack.enter_context(RtspCamera(clip or self.clip(), Stream(**stream)))

    def mjpeg(self, **options: Any) -> MjpegCamera:
        """Start a camera that serves JPEGs over HTTP; see `MjpegCamera`."""
        pictures = itertools.cycle(jpegs())
        return self._stack.enter_context(MjpegCamera(lambda: next(pictures), **options))

    def proxy(self, port: int) -> TcpProxy:
        return self._stack.enter_context(TcpProxy(port))

    def relay(self, port: int, loss: float = 0.05) -> LossyRelay:
        return self._stack.enter_context(LossyRelay(port, loss=loss))

    def silent_port(self) -> int:
        return self._stack.enter_context(SilentPort()).port

    def redirecting_port(self, location: str, host: str = "127.0.0.1") -> RedirectingPort:
        return self._stack.enter_context(RedirectingPort(location, host))

    def dropping_port(self) -> int:
        return self._stack.enter_context(DroppingPort()).port


no_rtsp_camera = functools.cache(what_is_missing)
