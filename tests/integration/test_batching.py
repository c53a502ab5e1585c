"""Dynamic batching as clients meet it: a real daemon, a real model, a stock client."""

from __future__ import annotations

import queue
import signal
import threading
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from edge_server.errors import EdgeServerError
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.daemon_process import Process

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


GATED = """
backend: "python"
max_batch_size: 8
input { name: "times" data_type: TYPE_INT64 dims: 1 }
output { name: "rows" data_type: TYPE_INT64 dims: 1 }
"""
GATED_PY = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        times = [pb_utils.get_input_tensor_by_name(r, "times").as_numpy() for r in requests]
        if max(map(np.max, times)) > 0:
            print("the long run has begun", flush=True)
            while not pathlib.Path("@gate").exists():
                time.sleep(0.01)
        rows = pb_utils.Tensor("rows", np.array([[len(requests)]], np.int64))
        return [pb_utils.InferenceResponse([rows]) for _ in requests]
"""


class Asking:
    """Requests in flight of one client, in the order in which they are answered.

    Args:
        gate: of the model that can be held; the file whose making lets its run go on.
    """

    def __init__(
        self, process: Process, server: triton.InferenceServerClient, gate: Path | None = None
    ) -> None:
        self._process = process
        self._server = server
        self._gate = gate
        self._answered: queue.Queue[tuple[str, object]] = queue.Queue()
        # The connection stands, so that what is asked from now on comes in order and soon.
        server.infer("counting", times(NO_TIME))

    def ask(self, name: str, value: int) -> None:
        def answered(result: triton.InferResult, error: InferenceServerException) -> None:
            self._answered.put((name, error or int(result.as_numpy("rows")[0, 0])))

        self._server.async_infer("counting", times(value), callback=answered, request_id=name)

    def occupy(self) -> None:
        """Return when a run has begun that lasts until `let_go`."""
        self.ask("long", LONG)
        log = self._process.log
        wait_until(lambda: "the long run has begun" in log.read_text(), otherwise=log.read_text)

    def wait_for_line(self, count: int) -> None:
        """Return when so many requests wait behind the run."""
        wait_until(lambda: self.waiting() == count, otherwise=lambda: f"{self.waiting()} wait")

    def waiting(self) -> int:
        return int(self._process.metric('nv_inference_pending_request_count{model="counting"'))

    def let_go(self) -> None:
        assert self._gate is not None
        self._gate.touch()

    def next(self) -> tuple[str, object]:
        """Who is answered next, and with how many rows it ran, or its error."""
        return self._answered.get(timeout=TIMEOUT_S)


@pytest.fixture
def gated(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> Callable[..., tuple[Process, Asking]]:
    """Starts a daemon with the model that can be held."""

    def make(batching: str = "") -> tuple[Process, Asking]:
        directory = tmp_path / "models" / "counting"
        (directory / "1").mkdir(parents=True)
        gates = tmp_path / "gates"
        gates.mkdir()
        (directory / "1" / "model.py").write_text(GATED_PY.replace("@gate", str(gates / "open")))
        (directory / "config.pbtxt").write_text(f"{GATED} dynamic_batching {{ {batching} }}")
        config = tmp_path / "config.toml"
        config.write_text(
            f'[repository]\npaths = ["{tmp_path}/models"]\n[python]\nreadable = ["{gates}"]\n'
        )
        process = start("--config", str(config))
        return process, Asking(process, client(process), gates / "open")

    return make


def test_what_comes_while_the_model_runs_runs_together(
    gated: Callable[..., tuple[Process, Asking]],
) -> None:
    _, asking = gated()
    asking.occupy()
    for number in range(8):
        asking.ask(f"short {number}", NO_TIME)
    asking.wait_for_line(8)
    asking.let_go()
    answers = dict(asking.next() for _ in range(9))
    assert answers.pop("long") == 1
    assert set(answers.values()) == {8}


def test_sigterm_lets_those_in_the_line_run(gated: Callable[..., tuple[Process, Asking]]) -> None:
    process, asking = gated()
    asking.occupy()
    for number in range(3):
        asking.ask(f"short {number}", NO_TIME)
    asking.wait_for_line(3)
    process.popen.send_signal(signal.SIGTERM)
    process.wait_for("STOPPING=1")
    asking.let_go()
    assert process.popen.wait(TIMEOUT_S) == 0
    assert dict(asking.next() for _ in range(4)) == {
        "long": 1,
        **{f"short {number}": 3 for number in range(3)},
    }


def test_sigterm_ends_the_daemon_even_while_a_batch_hangs(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "models")
    process = start("--model-repository", str(tmp_path / "models"))
    asking = Asking(process, client(process))
    asked = 0

    def one_waits() -> bool:
        # What comes at once with the first may run with it; then the next one waits.
        nonlocal asked
        asking.ask(str(asked := asked + 1), 2**40)
        return asked > 1 and asking.waiting() > 0

    wait_until(one_waits)
    assert process.terminate() == 0
    assert all(isinstance(asking.next()[1], InferenceServerException) for _ in range(asked))


def test_under_a_crowd_every_client_gets_its_own_answer(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "max_queue_delay_microseconds: 500")
    registry = ModelRegistry()
    lifecycle = ModelLifecycle(ModelTable(registry))
    assert RepositoryLoader(lifecycle, Repositories([tmp_path / "models"])).load_all() == []
    data_plane = DataPlane(registry)
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
    counts = registry.snapshot.find("counting").statistics.counts()
    assert counts.inference_count == 6 * 20 * 6
    assert counts.execution_count < counts.success.count
    registry.clear()
