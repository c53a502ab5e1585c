"""Real parts for integration tests."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.free_ports import free_ports
from support.live_cameras.clip import Clip, jpegs, write_road
from support.live_cameras.mjpeg import MjpegCamera
from support.live_cameras.network import DroppingPort, LossyRelay, SilentPort, TcpProxy
from support.live_cameras.rtsp import RtspCamera, Stream, what_is_missing
from support.mosquitto import Mosquitto, mosquitto_binary
from support.preloaded import preloaded, start_daemon
from support.settings_drive import Drive

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TIMEOUT_S = 30.0
POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.2", "--repository-settle-secs=0.3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, or the run would end with one of them alone; serial tests run
    where the long ones do: `scripts/test --all`."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for item in items:
        if item.get_closest_marker("serial") and not item.get_closest_marker("long"):
            raise pytest.UsageError(f"{item.nodeid}: serial, and not long: nobody would run it")


@pytest.fixture(scope="session", autouse=True)
def daemons_are_preloaded(own_temporary_folder: None) -> Iterator[None]:
    """Before a test changes folder or environment."""
    process = preloaded()
    yield
    process.close()


@pytest.fixture
def stopped_mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that lets everyone in and is not yet there."""
    if not mosquitto_binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    broker = Mosquitto(tmp_path)
    yield broker
    broker.kill()


@pytest.fixture
def mosquitto(stopped_mosquitto: Mosquitto) -> Mosquitto:
    """A broker that lets everyone in, running."""
    stopped_mosquitto.start()
    return stopped_mosquitto


@pytest.fixture
def mosquitto_with(tmp_path: Path) -> Iterator[type[Mosquitto]]:
    """Makes and starts brokers with lines of mosquitto.conf: `mosquitto_with("acl_file f")`."""
    if not mosquitto_binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    made: list[Mosquitto] = []

    def make(*lines: str) -> Mosquitto:
        made.append(Mosquitto(tmp_path, *lines))
        made[-1].start()
        return made[-1]

    yield make  # type: ignore[misc]
    for broker in made:
        broker.kill()


class Process:
    """`edge-server run` with its own notify socket, so that READY is heard as systemd hears it.

    `within` is a command that runs the daemon in its own place, such as `unshare --mount`.
    """

    def __init__(self, folder: Path, *arguments: str, within: Sequence[str] = ()) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / "notify"
        address.unlink(missing_ok=True)  # of one that was started before
        self._socket.bind(str(address))
        self._socket.settimeout(0.5)
        self._draining: threading.Thread | None = None
        self.log = folder / "log"
        self.port, self.metrics_port, self.http_port = free_ports(3)
        self.popen = start_daemon(
            [
                "run",
                f"--grpc-port={self.port}",
                f"--metrics-port={self.metrics_port}",
                f"--http-port={self.http_port}",
                *arguments,
            ],
            {**os.environ, "NOTIFY_SOCKET": str(address)},
            self.log,
            within,
        )

    def wait_for(self, assignment: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        said = ""
        while assignment not in said:
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}:\n{self.log.read_text()}")
            assert time.monotonic() < end, f"{assignment} was not said:\n{self.log.read_text()}"
            with suppress(TimeoutError):
                said = self._socket.recv(4096).decode()

    def drain(self) -> None:
        """Read on, until `close`, what the daemon says: it waits for a reader that does not."""

        def read() -> None:
            while self.popen.poll() is None:
                with suppress(TimeoutError, OSError):
                    self._socket.recv(4096)

        self._draining = threading.Thread(target=read)
        self._draining.start()

    def terminate(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(TIMEOUT_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        if self._draining is not None:
            self._draining.join()
        self._socket.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts the daemon with these arguments and waits until it says READY."""
    started: list[Process] = []

    def start_process(*arguments: str, within: Sequence[str] = ()) -> Process:
        process = Process(tmp_path, *arguments, within=within)
        started.append(process)
        process.wait_for("READY=1")
        return process

    yield start_process
    for process in started:
        process.close()


@pytest.fixture
def drive(
    tmp_path: Path, start: Callable[..., Process], mosquitto: Mosquitto
) -> Iterator[Callable[..., Drive]]:
    """Starts a daemon with a broker and these cameras; see `Drive`."""
    made: list[Drive] = []

    def make(*cameras: str, flags: tuple[str, ...] = ()) -> Drive:
        made.append(Drive(tmp_path, start, mosquitto, *cameras, flags=flags))
        return made[-1]

    yield make
    for each in made:
        each.subscriber.close()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One daemon with the shipped models, for all tests of a file that change nothing of it."""
    models = Path(__file__).parents[2] / "models"
    process = Process(tmp_path_factory.mktemp("shipped"), f"--model-repository={models}")
    try:
        process.wait_for("READY=1")
        yield process
    finally:
        process.close()


@pytest.fixture
def client(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[Process], triton.InferenceServerClient]]:
    made: list[triton.InferenceServerClient] = []

    def connect(process: Process) -> triton.InferenceServerClient:
        made.append(triton.InferenceServerClient(f"127.0.0.1:{process.port}"))
        return made[-1]

    yield connect
    for each in made:
        each.close()


class Server:
    """A daemon that polls, and what it answers."""

    def __init__(
        self, process: Process, client: triton.InferenceServerClient, repository: Path
    ) -> None:
        self.process = process
        self.client = client
        self.repository = repository

    def answer(self, model: str = "m") -> float:
        values = triton.InferInput("x", [1], "FP32")
        values.set_data_from_numpy(np.zeros(1, np.float32))
        return float(self.client.infer(model, [values]).as_numpy("y")[0])

    def wait_for(self, number: float, model: str = "m") -> set[float]:
        """Ask until the answer is `number`; what was answered before. No request may fail."""
        before: set[float] = set()
        end = time.monotonic() + TIMEOUT_S
        while (answer := self.answer(model)) != number:
            before.add(answer)
            assert time.monotonic() < end, (before, self.index(), self.log)
        return before

    def wait_for_reason(self, said: str, model: str = "m", ask: str = "m") -> str:
        """Ask `ask` until the index says so of `model`; its state."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            for state, reason in self.index().get(model, []):
                if said in reason:
                    return state
            assert time.monotonic() < end, (self.index(), self.log)
            self.answer(ask)

    def index(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for entry in self.client.get_model_repository_index().models:
            found.setdefault(entry.name, []).append((entry.state, entry.reason))
        return found

    def metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.process.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
            lines = page.read().decode().splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith(f"{name} "))
        return float(value)

    @property
    def log(self) -> str:
        return self.process.log.read_text()


@pytest.fixture
def serve(
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
) -> Callable[..., Server]:
    """Starts a daemon that follows `tmp_path/repository`; its copies are in `tmp_path/store`."""
    repository = tmp_path / "repository"

    def make(*arguments: str, within: Sequence[str] = ()) -> Server:
        process = start(
            *POLL,
            f"--model-repository={repository}",
            f"--repository-copies={tmp_path / 'store'}",
            *arguments,
            within=within,
        )
        return Server(process, client(process), repository)

    return make


@pytest.fixture(scope="session")
def strace() -> str:
    """The program strace, which may trace here."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is missing; to have it: apt install strace")
    command = [program, "-qq", "-e", "trace=none", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"strace may not trace here: {tried.stderr.strip()}")
    return program


@pytest.fixture(scope="session")
def in_memory() -> Iterator[Callable[[], Path]]:
    """Makes empty folders in memory, where that is possible: a process that is killed, unlike a
    board that loses its power, leaves there what it leaves on a disk, and nothing waits for one."""
    memory = Path("/dev/shm")  # noqa: S108
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield lambda: Path(tempfile.mkdtemp(dir=folder))


@pytest.fixture
def road_image(tmp_path: Path) -> np.ndarray:
    """One rendered road, and a folder of just that image for a camera to look at."""
    source = open_source("synthetic://road?seed=7&fps=0")
    frame = source.read()
    source.close()
    assert frame is not None
    image = bgr_of(frame.image)
    folder = tmp_path / "road"
    folder.mkdir()
    cv2.imwrite(str(folder / "0.png"), image)
    return image


@pytest.fixture
def road_input(road_image: np.ndarray) -> triton.InferInput:
    """The same road as a request's input."""
    tensor = triton.InferInput("image", [1, *road_image.shape], "UINT8")
    tensor.set_data_from_numpy(road_image[np.newaxis])
    return tensor


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

    def dropping_port(self) -> int:
        return self._stack.enter_context(DroppingPort()).port


no_rtsp_camera = functools.cache(what_is_missing)


@pytest.fixture
def live_cameras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCameras]:
    """Cameras that are real to a reader."""
    with ExitStack() as stack:
        yield LiveCameras(tmp_path_factory.getbasetemp(), stack)
