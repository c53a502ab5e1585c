"""Dynamic batching as clients meet it: a real daemon, a real ONNX model, a stock client."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from edge_server.errors import Cancelled, EdgeServerError, Unavailable
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.model_table import ModelTable
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest, InferResponse, ResponseCallback
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.integration.conftest import Process

TIMEOUT_S = 30.0
# So many loops take the model a second or so; none takes it no time.
LONG = 2_000_000
NO_TIME = 0


def write_model(repository: Path, batching: str = "") -> None:
    """`counting`: loops as often as the largest of `times` says; `rows` is how many rows ran
    together, for each of them. One instance, batches of 8."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["more_out"]),
            helper.make_node("Identity", ["value"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("more_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.INT64, [1]),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["times"], ["shape"]),
            helper.make_node("Gather", ["shape", "first"], ["count"]),
            helper.make_node("ReduceMax", ["times"], ["loops"], keepdims=0),
            helper.make_node("Loop", ["loops", "", "count"], ["end"], body=body),
            helper.make_node("Expand", ["end", "shape"], ["rows"]),
        ],
        "counting",
        [helper.make_tensor_value_info("times", TensorProto.INT64, ["n", 1])],
        [helper.make_tensor_value_info("rows", TensorProto.INT64, ["n", 1])],
        [helper.make_tensor("first", TensorProto.INT64, [1], [0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    directory = repository / "counting"
    (directory / "1").mkdir(parents=True)
    onnx.save(model, directory / "1" / "model.onnx")
    (directory / "config.pbtxt").write_text(
        "max_batch_size: 8 instance_group { kind: KIND_CPU count: 1 } "
        f"dynamic_batching {{ {batching} }}"
    )


def times(value: int) -> list[triton.InferInput]:
    tensor = triton.InferInput("times", [1, 1], "INT64")
    tensor.set_data_from_numpy(np.array([[value]], np.int64))
    return [tensor]


class Asking:
    """Requests in flight of one client, in the order in which they are answered."""

    def __init__(self, server: triton.InferenceServerClient) -> None:
        self._server = server
        self._answered: queue.Queue[tuple[str, object]] = queue.Queue()
        # The connection stands, so that what is asked from now on comes in order and soon.
        server.infer("counting", times(NO_TIME))

    def ask(self, name: str, value: int) -> None:
        def answered(result: triton.InferResult, error: InferenceServerException) -> None:
            self._answered.put((name, error or int(result.as_numpy("rows")[0, 0])))

        self._server.async_infer("counting", times(value), callback=answered, request_id=name)

    def occupy(self) -> None:
        """Ask for a long run, and give it time to begin: nobody outside can see that it has."""
        self.ask("long", LONG)
        time.sleep(0.2)

    def next(self) -> tuple[str, object]:
        """Who is answered next, and with how many rows it ran, or its error."""
        return self._answered.get(timeout=TIMEOUT_S)


def test_what_comes_while_the_model_runs_runs_together(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "models")
    asking = Asking(client(start("--model-repository", str(tmp_path / "models"))))
    asking.occupy()
    for number in range(8):
        asking.ask(f"short {number}", NO_TIME)
    answers = dict(asking.next() for _ in range(9))
    assert answers.pop("long") == 1
    assert set(answers.values()) == {8}


def test_a_full_line_is_said_at_once(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "models", "default_queue_policy { max_queue_size: 2 }")
    asking = Asking(client(start("--model-repository", str(tmp_path / "models"))))
    asking.occupy()
    for number in range(5):
        asking.ask(f"short {number}", NO_TIME)
    # The refusals overtake the run that is under way.
    answers = [asking.next() for _ in range(6)]
    for name, error in answers[:3]:
        assert isinstance(error, InferenceServerException)
        assert error.status() == "StatusCode.UNAVAILABLE"
        assert error.message() == f"[request id: {name}] Exceeds maximum queue size"
    assert sorted(str(rows) for _, rows in answers[3:]) == ["1", "2", "2"]


def test_a_time_limit_is_kept_in_tritons_words(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_model(
        tmp_path / "models", "default_queue_policy { default_timeout_microseconds: 200000 }"
    )
    asking = Asking(client(start("--model-repository", str(tmp_path / "models"))))
    asking.occupy()
    asking.ask("short", NO_TIME)
    answers = dict(asking.next() for _ in range(2))
    assert answers["long"] == 1
    error = answers["short"]
    assert isinstance(error, InferenceServerException)
    assert (error.status(), error.message()) == (
        "StatusCode.UNAVAILABLE",
        "Request timeout expired",
    )


def test_sigterm_lets_those_in_the_line_run(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "models")
    process = start("--model-repository", str(tmp_path / "models"))
    asking = Asking(client(process))
    # Short enough for the daemon's grace.
    for _ in range(4):
        asking.ask("short", LONG // 8)
    time.sleep(0.2)
    assert process.terminate() == 0
    assert all(isinstance(asking.next()[1], int) for _ in range(4))


def test_sigterm_ends_the_daemon_even_while_a_batch_hangs(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "models")
    process = start("--model-repository", str(tmp_path / "models"))
    asking = Asking(client(process))
    for name in ("hangs", "waits"):
        asking.ask(name, 2**40)
    time.sleep(0.2)
    assert process.terminate() == 0
    assert all(isinstance(asking.next()[1], InferenceServerException) for _ in range(2))


class Caller:
    cancelled = False

    def when_cancelled(self, callback: Callable[[], None]) -> None: ...


class InProcess:
    """The loader and the data plane over the same repository, without a transport."""

    def __init__(self, repository: Path) -> None:
        self.registry = ModelRegistry()
        assert (
            RepositoryLoader(ModelTable(self.registry), Repositories([repository])).load_all() == []
        )
        self._data_plane = DataPlane(self.registry)
        self.answered: queue.Queue[tuple[str, ResponseCallback]] = queue.Queue()
        self.loaded = self.registry.snapshot.find("counting")

    def ask(self, name: str, value: int, **fields: object) -> None:
        tensor = Tensor(np.array([[value]], np.int64))
        request = InferRequest("counting", {"times": tensor}, id=name, **fields)  # type: ignore[arg-type]
        self._data_plane.submit(request, lambda answer, final: self.answered.put((name, answer)))

    def occupy(self) -> None:
        """Returns when a long run is under way."""
        self.ask("long", LONG)
        until = time.monotonic() + TIMEOUT_S
        while self.loaded.scheduler.running_since() == math.inf:
            assert time.monotonic() < until
            time.sleep(0.005)

    def answers(self, count: int) -> list[tuple[str, ResponseCallback]]:
        return [self.answered.get(timeout=TIMEOUT_S) for _ in range(count)]


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[Callable[[str], InProcess]]:
    made: list[InProcess] = []

    def make(batching: str) -> InProcess:
        write_model(tmp_path / "models", batching)
        made.append(InProcess(tmp_path / "models"))
        return made[-1]

    yield make
    for each in made:
        each.registry.clear()


def test_batches_are_counted_as_one_execution(in_process: Callable[[str], InProcess]) -> None:
    server = in_process("")
    server.occupy()
    for number in range(8):
        server.ask(str(number), NO_TIME)
    server.answers(9)
    counts = server.loaded.statistics.counts()
    assert (counts.execution_count, counts.inference_count) == (2, 9)
    assert sorted(counts.batches) == [1, 8]


def test_a_higher_priority_overtakes_the_line(in_process: Callable[[str], InProcess]) -> None:
    server = in_process("priority_levels: 2 default_priority_level: 2 preferred_batch_size: 1")
    server.occupy()
    for name, priority in (("a", 2), ("b", 0), ("first", 1)):
        server.ask(name, NO_TIME, priority=priority)
    assert [name for name, _ in server.answers(4)] == ["long", "first", "a", "b"]


def test_a_request_may_ask_for_less_time_than_the_model_allows(
    in_process: Callable[[str], InProcess],
) -> None:
    server = in_process(
        "default_queue_policy { default_timeout_microseconds: 60000000 "
        "allow_timeout_override: true }"
    )
    server.occupy()
    server.ask("patient", NO_TIME)
    server.ask("hasty", NO_TIME, timeout_us=1)
    answers = dict(server.answers(3))
    assert isinstance(answers["patient"], InferResponse)
    assert isinstance(answers["hasty"], Unavailable)
    assert str(answers["hasty"]) == "Request timeout expired"


def test_who_has_gone_does_not_run(in_process: Callable[[str], InProcess]) -> None:
    server = in_process("")
    server.occupy()
    caller = Caller()
    server.ask("gone", NO_TIME, cancellation=caller)
    server.ask("stays", NO_TIME)
    caller.cancelled = True
    answers = dict(server.answers(3))
    assert isinstance(answers["gone"], Cancelled)
    stays = answers["stays"]
    assert isinstance(stays, InferResponse)
    assert stays.outputs["rows"].array.tolist() == [[1]]


def test_under_a_crowd_every_client_gets_its_own_answer(
    in_process: Callable[[str], InProcess],
) -> None:
    server = in_process("max_queue_delay_microseconds: 500")
    data_plane = DataPlane(server.registry)
    failed: list[EdgeServerError] = []

    def ask_all() -> None:
        for rows in (1, 3, 2) * 20:
            tensor = Tensor(np.zeros((rows, 1), np.int64))
            try:
                response = data_plane.infer(InferRequest("counting", {"times": tensor}))
            except EdgeServerError as error:
                failed.append(error)
            else:
                together = response.outputs["rows"].array
                assert together.shape == (rows, 1)
                assert rows <= together[0, 0] <= 8

    threads = [threading.Thread(target=ask_all) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert failed == []
    counts = server.loaded.statistics.counts()
    assert counts.inference_count == 6 * 20 * 6
    assert counts.execution_count < counts.success.count
