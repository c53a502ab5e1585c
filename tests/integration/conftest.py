"""Real parts for integration tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.daemon_process import Process
from support.live_cameras.started import LiveCameras
from support.mosquitto import Mosquitto, mosquitto_binary
from support.polling_server import POLL, Server
from support.preloaded import PRELOADED
from support.settings_drive import Drive

from edge_server.cameras.colour import bgr_of
from edge_server.cameras.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.simulated_gpu import SimulatedGpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, or the run would end with one of them alone; serial tests run
    where the long ones do: `scripts/test --all`."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for item in items:
        if item.get_closest_marker("serial") and not item.get_closest_marker("long"):
            raise pytest.UsageError(f"{item.nodeid}: serial, and not long: nobody would run it")


@pytest.fixture(scope="session", autouse=True)
def edge_server_is_preloaded(own_temporary_folder: None) -> Iterator[None]:
    """Before a test changes folder or environment."""
    PRELOADED.begin()
    yield
    PRELOADED.end()


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

    yield make
    for broker in made:
        broker.kill()


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


@pytest.fixture
def on_gpu(
    simulated_libcuda: SimulatedGpu, kernels_on_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Lets every process that is started find a GPU, and a TensorRT of these settings."""

    def set_up(tensorrt: str = "", cuda: str = "") -> None:
        for name, value in simulated_libcuda.environment(cuda).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("EDGE_SIMULATED_KERNELS", str(kernels_on_cpu))
        monkeypatch.setenv("EDGE_SIMULATED_TENSORRT", tensorrt)

    set_up()
    return set_up


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


@pytest.fixture
def live_cameras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCameras]:
    """Cameras that are real to a reader, which keeps pace with them on a busy machine, too, where
    root may say so: what is tested is no processor that is shared."""
    with ExitStack() as stack:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -5)
            stack.callback(os.setpriority, os.PRIO_PROCESS, 0, 0)
        yield LiveCameras(tmp_path_factory.getbasetemp(), stack)
