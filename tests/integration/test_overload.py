"""More requests than the server takes: each is answered, at once or in its turn, and all is well
afterwards. The real server and the published client; the model runs when it is told to."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.model_configs import config_of
from support.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from edge_server.api.grpc.server import GrpcServer
from edge_server.api.triton_calls import TritonCalls
from edge_server.backends.contract import TensorModel
from edge_server.inference.data_plane import PLAIN_LOAD, DataPlane, LoadOptions
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling
from edge_server.settings import Grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tritonclient.utils import InferenceServerException

    from edge_server.backends.contract import Tensors

TIMEOUT_S = 30.0
# What the server takes in at once here, and ten times as many.
TAKEN = 28
ASKED = 280
DIRECT = ""
BATCHED = "max_batch_size: 4 dynamic_batching { default_queue_policy { max_queue_size: 8 } }"
# One batch of one runs, and the line is full.
TAKEN_BATCHED = 1 + 8


class Model(TensorModel):
    """Each run says that it has begun, and waits until it may go on."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        super().__init__(self._run)

    def _run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.begun.release()
        assert self.go_on.wait(TIMEOUT_S)
        return {"y": inputs["x"]}


class Server:
    """The gRPC side of a daemon, with one model of one instance, `m`."""

    def __init__(self, scheduling: str) -> None:
        text = (
            'name: "m" backend: "identity" instance_group { name: "m" count: 1 }'
            'input { name: "x" data_type: TYPE_UINT8 dims: -1 }'
            'output { name: "y" data_type: TYPE_UINT8 dims: -1 }'
        )
        config = config_of(text + scheduling)
        self.model = Model()
        self.loaded = Scheduling().model(config, 1, self.model)
        self.registry = ModelRegistry()
        self.registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=self.loaded)])
        data_plane = DataPlane(self.registry)
        data_plane.open()
        # One connection carries them all.
        settings = Grpc(port=0, max_streams=2 * ASKED)
        self._grpc = GrpcServer(
            TritonCalls(data_plane, "triton", "1"), settings, max_inferences=TAKEN
        )
        self._grpc.start()
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self._grpc.port}")
        self._shape = [1, 64] if config.max_batch_size else [64]

    def ask(self, answers: Answers, bytes_: int = 64, timeout_s: float | None = None) -> Any:
        shape = [*self._shape[:-1], bytes_]
        given = triton.InferInput("x", shape, "UINT8")
        given.set_data_from_numpy(np.zeros(shape, np.uint8))
        return self.client.async_infer("m", [given], answers.take, client_timeout=timeout_s)

    @property
    def inside(self) -> int:
        """How many places are taken."""
        return self._grpc._sides[-1].gate.inside

    def close(self) -> None:
        self.model.go_on.set()
        self.client.close()
        self._grpc.stop(0)
        self.registry.clear()


class Answers:
    """The status of each answer as it comes; "OK" of a result."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str] = queue.Queue()

    def take(self, result: object, error: InferenceServerException | None) -> None:
        status = "OK" if error is None else str(error.status()).removeprefix("StatusCode.")
        self._queue.put(status)

    def next(self, count: int) -> Counter[str]:
        return Counter(self._queue.get(timeout=TIMEOUT_S) for _ in range(count))


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.close()


def fill(server: Server, taken: int, asked: int, **how: object) -> Answers:
    """Ask so often while the model runs; all but `taken` are refused before it has ended."""
    server.model.go_on.clear()
    while server.model.begun.acquire(blocking=False):
        pass  # runs of an earlier time
    answers = Answers()
    server.ask(answers, **how)
    assert server.model.begun.acquire(timeout=TIMEOUT_S)
    for _ in range(asked - 1):
        server.ask(answers, **how)
    assert answers.next(asked - taken) == {"UNAVAILABLE": asked - taken}
    return answers


WORLDS = pytest.mark.parametrize(
    ("server", "taken"),
    [(DIRECT, TAKEN), (BATCHED, TAKEN_BATCHED)],
    ids=["direct", "batched"],
    indirect=["server"],
)


@WORLDS
def test_who_is_too_many_is_refused_while_the_model_runs_and_nobody_else(
    server: Server, taken: int
) -> None:
    for _ in range(3):
        answers = fill(server, taken, ASKED)
        assert server.client.is_server_live()
        assert server.client.is_model_ready("m")
        wait_until(lambda: server.loaded.scheduler.pending() == taken - 1)
        server.model.go_on.set()
        assert answers.next(taken) == {"OK": taken}


@pytest.mark.parametrize("server", [DIRECT], indirect=True)
def test_large_requests_are_refused_in_the_same_words(server: Server) -> None:
    answers = fill(server, TAKEN, 60, bytes_=2_764_800)
    server.model.go_on.set()
    assert answers.next(TAKEN) == {"OK": TAKEN}


@WORLDS
def test_the_places_of_those_who_left_are_free_while_the_model_still_runs(
    server: Server, taken: int
) -> None:
    """Some wait no longer, some take their requests back: none of them runs."""
    busy, gone = Answers(), Answers()
    server.ask(busy)
    assert server.model.begun.acquire(timeout=TIMEOUT_S)
    for _ in range(5):
        server.ask(gone, timeout_s=0.3)
    for call in [server.ask(gone) for _ in range(ASKED)]:
        call.cancel()
    statuses = gone.next(5 + ASKED)
    assert statuses.keys() <= {"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
    wait_until(lambda: server.inside == 1)
    server.model.go_on.set()
    assert busy.next(1) == {"OK": 1}
    wait_until(lambda: server.inside == 0)
    assert not server.model.begun.acquire(blocking=False)
    answers = fill(server, taken, ASKED)
    server.model.go_on.set()
    assert answers.next(taken) == {"OK": taken}


class Loads:
    """A ModelControl whose loads go on until it is received that they are done."""

    loads_on_request = True

    def __init__(self) -> None:
        self.done = threading.Event()

    def load(self, name: str, options: LoadOptions = PLAIN_LOAD) -> None:
        assert self.done.wait(2 * TIMEOUT_S)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None: ...

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return []


def test_however_many_loads_are_requested_the_server_reports_its_state() -> None:
    control = Loads()
    settings = Grpc(port=0, max_streams=200)
    server = GrpcServer(TritonCalls(DataPlane(ModelRegistry()), "triton", "1", control), settings)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            loads = [
                stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="m"))
                for _ in range(100)
            ]
            refused = threading.Event()
            for load in loads:
                load.add_done_callback(lambda _: refused.set())
            assert refused.wait(TIMEOUT_S)
            assert stub.ServerLive(pb.ServerLiveRequest(), timeout=TIMEOUT_S).live
            control.done.set()
            codes = {load.code() for load in loads}
    finally:
        control.done.set()
        server.stop(TIMEOUT_S)
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
