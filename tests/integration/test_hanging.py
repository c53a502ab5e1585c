"""A model that hangs, or an end that comes amid requests, costs nobody else anything."""

from __future__ import annotations

import queue
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tritonclient.grpc as triton
from support.endless_onnx import write_endless_onnx
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.daemon_process import Process

MODELS = Path(__file__).parents[2] / "models"
TIMEOUT_S = 30.0


def test_sigterm_lets_requests_in_flight_finish(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    process = start("--model-repository", str(MODELS))
    server = client(process)
    answered: list[object] = []
    refused = threading.Event()

    def ask_until_refused() -> None:
        while not refused.is_set():
            try:
                answered.append(server.infer("lane_detection", [road_input]))
            except InferenceServerException as error:
                answered.append(error)
                refused.set()

    asking = threading.Thread(target=ask_until_refused)
    asking.start()
    wait_until(lambda: len(answered) >= 3 or process.popen.poll() is not None)
    assert process.terminate() == 0
    asking.join(TIMEOUT_S)
    errors = [a for a in answered if isinstance(a, InferenceServerException)]
    # The one that came after the end was refused; none was cut off in the middle. A busy machine
    # may ask when nobody listens any more.
    (error,) = errors
    assert error.status() == "StatusCode.UNAVAILABLE"
    assert re.match(
        r"GRPC server is shutting down and has stopped accepting new requests\.$"
        r"|failed to connect to all addresses; .* Connection refused",
        error.message(),
    ), error.message()
    assert "stopped" in process.log.read_text()


def test_sigterm_ends_the_daemon_even_while_a_model_hangs(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
) -> None:
    write_endless_onnx(tmp_path / "models" / "endless" / "1" / "model.onnx")
    process = start("--model-repository", str(tmp_path / "models"))
    server = client(process)
    times = triton.InferInput("times", [1], "INT64")
    times.set_data_from_numpy(np.array([1], np.int64))
    assert server.infer("endless", [times]).as_numpy("end").tolist() == [0.0]
    times.set_data_from_numpy(np.array([2**40], np.int64))
    failed = threading.Event()
    server.async_infer("endless", [times], callback=lambda result, error: failed.set())
    assert not failed.wait(0.5)
    assert process.terminate() == 0
    assert failed.wait(TIMEOUT_S)


def test_calls_behind_a_model_that_hangs_end_at_their_deadline_and_the_rest_goes_on(
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    tmp_path: Path,
    road_input: triton.InferInput,
) -> None:
    write_endless_onnx(tmp_path / "models" / "endless" / "1" / "model.onnx")
    process = start(
        "--model-repository", str(tmp_path / "models"), "--model-repository", str(MODELS)
    )
    server = client(process)
    times = triton.InferInput("times", [1], "INT64")
    times.set_data_from_numpy(np.array([2**40], np.int64))
    ended: queue.Queue[InferenceServerException] = queue.Queue()
    for _ in range(9):
        server.async_infer(
            "endless", [times], callback=lambda result, error: ended.put(error), client_timeout=0.5
        )
    statuses = {ended.get(timeout=TIMEOUT_S).status() for _ in range(9)}
    assert statuses == {"StatusCode.DEADLINE_EXCEEDED"}
    assert server.is_server_live()
    assert len(server.infer("lane_detection", [road_input]).as_numpy("lane_scores"))
