"""The whole appliance in this process, with live cameras, a real broker and a subscriber.

Shared by `camera_faults.py` and `camera_latency.py`; the cameras are in
`tests/support/live_cameras`.
Import this file before those, as it adds `tests` to the path.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.live_cameras.clip import write_road  # noqa: E402 - found only since the line before
from support.live_cameras.rtsp import RtspCamera, Stream  # noqa: E402 - likewise
from support.live_cameras.time_code import read_time  # noqa: E402 - likewise
from support.mosquitto import Mosquitto, Subscriber  # noqa: E402 - likewise

from edge_server.cameras.gstreamer import gstreamer_missing  # noqa: E402 - likewise
from edge_server.daemon.daemon import Daemon  # noqa: E402 - likewise
from edge_server.settings import read_settings  # noqa: E402 - likewise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from edge_server.cameras.frame import Frame
    from edge_server.pipeline.lane_pipeline import Listener

DEVICE = "bench"


class LiveDaemon:
    """A daemon from construction to `close`.

    Attributes:
        folder: is there as long as the daemon is.
        subscriber: hears every topic.

    Args:
        cameras: the fields of `[cameras.NAME]`, by name.
        listeners: see `Daemon`.
    """

    def __init__(
        self, cameras: Mapping[str, Mapping[str, Any]], listeners: tuple[Listener, ...] = ()
    ) -> None:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        broker = Mosquitto(self.folder)
        broker.start()
        self._stack.callback(broker.kill)
        self.subscriber = Subscriber(broker.port, f"edge/v1/{DEVICE}/#")
        self._stack.callback(self.subscriber.close)
        settings = read_settings(
            None,
            {
                "device": {"id": DEVICE},
                "repository": {"paths": [str(ROOT / "models")]},
                "grpc": {"port": 0},
                "metrics": {"enabled": False},
                "http": {"enabled": False},
                "mqtt": {"host": broker.host, "port": broker.port},
                "cameras": {name: dict(each) for name, each in cameras.items()},
            },
        )
        self.daemon = Daemon(settings, listeners)
        self._stop = threading.Event()
        self.daemon.start(self._stop)
        self._stack.callback(self.daemon.stop)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._stack.callback(self._end)

    def _run(self) -> None:
        try:
            self.daemon.run(self._stop)
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            self._failure = error

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise where the daemon would have restarted."""
        if self._failure is not None:
            raise self._failure

    def messages(
        self, since: int, suffix: str | tuple[str, ...]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return arrival time in ns and content of the messages of topics with this suffix, from
        message number `since` on."""
        return [
            (at, message)
            for at, (topic, message) in zip(
                self.subscriber.arrived_ns[since:], self.subscriber.in_order[since:], strict=False
            )
            if topic.endswith(suffix)
        ]

    def wait(
        self,
        since_ns: int,
        suffix: str | tuple[str, ...],
        fits: Callable[[dict[str, Any]], bool],
        limit_s: float,
    ) -> int | None:
        """Return when the first fitting message after `since_ns` arrived; None after `limit_s`."""
        looked, end = 0, time.monotonic() + limit_s
        while time.monotonic() < end:
            self.check()
            for at, message in self.messages(looked, suffix):
                if at >= since_ns and fits(message):
                    return at
            looked = max(0, len(self.subscriber.in_order) - 64)
            time.sleep(0.01)
        return None

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LiveDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def readers() -> list[str]:
    """Return the readers that this Python has."""
    return ["opencv"] if gstreamer_missing() else ["gstreamer", "opencv"]


@contextmanager
def stamped_cameras(rates_fps: Sequence[float], size: tuple[int, int]) -> Iterator[list[str]]:
    """Start RTSP cameras whose pictures show their time; yield a URI for each rate.

    Cameras of one rate are one server with one encoder, as this machine has to encode, too.
    """
    with ExitStack() as stack:
        clip = write_road(Path(stack.enter_context(tempfile.TemporaryDirectory())), *size)
        servers = {
            fps: stack.enter_context(RtspCamera(clip, Stream(fps=fps, stamp=True)))
            for fps in dict.fromkeys(rates_fps)
        }
        yield [servers[fps].uri() for fps in rates_fps]


def shown_ns(frame: Frame) -> int | None:
    """Return the CLOCK_MONOTONIC in the frame's pixels; None where none can be read."""
    return read_time(frame.image.luma())
