"""`edge-server demo`: the whole appliance on one road, and what arrives from it, for people."""

from __future__ import annotations

import logging
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from edge_server.appliance.logs import set_up_logging
from edge_server.cameras.picture import draw_lanes, write_picture
from edge_server.daemon import VERSION, Daemon
from edge_server.errors import Unavailable
from edge_server.mqtt import payloads
from edge_server.mqtt.identity import Identity
from edge_server.mqtt.subscriber import LaneSubscriber
from edge_server.settings import Camera, Device, Grpc, Mqtt, Repository, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.cameras.frame import Frame
    from edge_server.lanes.types import LaneFrame

DEVICE = "demo"
PICTURE = Path("lanes.png")
SHIPPED_MODELS = Path(__file__).parent.parent / "models"

_PATIENCE_S = 15.0
_REFRESH_S = 0.5


@dataclass
class Demo:
    """Starts a daemon with one camera, listens to its broker, and shows what arrives.

    Attributes:
        source: what the camera looks at; a plain path is played again and again.
        frames: how many lane messages to wait for; 0 is no end.
        broker: `host` and `port` to publish to; without it a private mosquitto where there is
            one, else none: then the messages are taken from the daemon directly.
        as_json: print each message instead of the table.
        repositories: the shipped models where none are given.
    """

    source: str
    frames: int
    broker: Mapping[str, Any] | None
    as_json: bool
    repositories: Sequence[str] | None
    _arrived: queue.Queue[bytes] = field(default_factory=queue.Queue, init=False)
    _newest: tuple[LaneFrame, Frame] | None = field(default=None, init=False)

    def run(self) -> int:
        """0 when `frames` messages arrived, the source ended or somebody pressed Ctrl-C.

        Raises:
            EdgeServerError: something is missing or wrong; see `Daemon`.
        """
        set_up_logging(verbose=0)
        logging.getLogger().setLevel(logging.WARNING)
        with ExitStack() as running:
            broker = self._broker(running)
            listeners = [self._keep] if broker else [self._keep, self._take_directly()]
            if broker:
                subscriber = LaneSubscriber(broker.host, broker.port, DEVICE, self._arrived.put)
                running.callback(subscriber.close)
            daemon = Daemon(self._settings(broker), listeners)
            daemon.start()
            running.callback(daemon.stop)
            self._say(
                f"edge-server {VERSION}: {self.source}; "
                f"gRPC on 127.0.0.1:{daemon.grpc_port}; "
                + (f"MQTT on {broker.host}:{broker.port}" if broker else "no MQTT broker here")
            )
            try:
                self._show(daemon)
            except KeyboardInterrupt:
                self._say("")
        if self._newest is not None:
            lane_frame, frame = self._newest
            write_picture(PICTURE, draw_lanes(frame.image, lane_frame.lanes))
            self._say(f"the last frame with its lanes is in {PICTURE.absolute()}")
        return 0

    def _settings(self, broker: Mqtt | None) -> Settings:
        paths = tuple(self.repositories or (str(SHIPPED_MODELS),))
        source = self.source
        if "://" not in source:
            source = f"file://{quote(str(Path(source).absolute()))}?loop=true"
        return Settings(
            device=Device(id=DEVICE),
            repository=Repository(paths=paths),
            grpc=Grpc(port=0),
            mqtt=broker,
            cameras={"road": Camera(uri=source)},
        )

    def _broker(self, running: ExitStack) -> Mqtt | None:
        if self.broker is not None:
            return Mqtt(**self.broker)
        binary = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
        return None if binary is None else _start_mosquitto(binary, running)

    def _keep(self, lane_frame: LaneFrame, frame: Frame) -> None:
        self._newest = (lane_frame, frame)

    def _take_directly(self) -> Any:
        identity = Identity.of_this_host(DEVICE, VERSION)

        def take(lane_frame: LaneFrame, frame: Frame) -> None:
            del frame
            now_ns = time.monotonic_ns()
            self._arrived.put(
                payloads.lane_frame(lane_frame, identity, lane_frame.frame_id, now_ns)
            )

        return take

    def _show(self, daemon: Daemon) -> None:
        table = None if self.as_json else _Table()
        arrived = 0
        patience = time.monotonic() + _PATIENCE_S
        while not self.frames or arrived < self.frames:
            try:
                payload = self._arrived.get(timeout=_REFRESH_S)
            except queue.Empty:
                if all(pipeline.camera.ended for pipeline in daemon.pipelines):
                    break
                if time.monotonic() > patience:
                    raise Unavailable(
                        f"no lanes arrived for {_PATIENCE_S:g} s from {self.source}"
                    ) from None
                continue
            patience = time.monotonic() + _PATIENCE_S
            arrived += 1
            if table is None:
                print(payload.decode(), flush=True)
            else:
                table.add(msgspec.json.decode(payload))
        if table is not None:
            table.finish()

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr if self.as_json else sys.stdout, flush=True)


class _Table:
    """One row that is renewed on a terminal, and repeated elsewhere."""

    _FORMAT = "{:>8} {:>8} {:>7} {:>9} {:>9} {:>6} {:>8}"

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._arrivals: list[float] = []
        self._count = 0
        self._shown_at = 0.0
        self._row = ""
        head = ("camera", "frames", "fps", "age ms", "infer ms", "lanes", "dropped")
        print(self._FORMAT.format(*head))

    def add(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._count += 1
        self._arrivals = [*self._arrivals[-49:], now]
        spanned_s = self._arrivals[-1] - self._arrivals[0]
        fps = (len(self._arrivals) - 1) / spanned_s if spanned_s > 0 else 0.0
        self._row = self._FORMAT.format(
            message["camera"],
            self._count,
            f"{fps:.1f}",
            f"{message['time']['age_us'] / 1e3:.1f}",
            f"{message['latency_us']['infer'] / 1e3:.1f}",
            len(message["lanes"]),
            message["dropped"],
        )
        if now - self._shown_at >= (_REFRESH_S if self._terminal else 2 * _REFRESH_S):
            self._shown_at = now
            print(self._row, end="\r" if self._terminal else "\n", flush=True)

    def finish(self) -> None:
        print(self._row, flush=True)


def _start_mosquitto(binary: str, running: ExitStack) -> Mqtt:
    folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="edge-server-demo-")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    configuration = folder / "mosquitto.conf"
    configuration.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n"
    )
    broker = subprocess.Popen(  # noqa: S603
        [binary, "-c", str(configuration)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    running.callback(broker.wait)
    running.callback(broker.terminate)
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return Mqtt(host="127.0.0.1", port=port)
    raise Unavailable(f"{binary} did not start; give another broker with --mqtt HOST:PORT")
