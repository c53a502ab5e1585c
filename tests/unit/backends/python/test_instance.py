"""An instance whose process is away waits for another one, but not so long that it is a hang."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.python.instance import LONGEST_TURN_S, ChildLimits, PythonInstance
from edge_server.backends.python.instance_arbiter import InstanceArbiter
from edge_server.backends.python.metrics import MetricBook
from edge_server.backends.python.model import start_message
from edge_server.backends.server_context import STANDALONE
from edge_server.errors import Unavailable
from edge_server.inference.snapshot import Snapshot
from edge_server.model_config.config import ModelConfig
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from edge_server.errors import EdgeServerError

CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "python"', pb.ModelConfig()))


class Busy:
    """A process that stands in, and has much to do."""

    up = True


def test_it_refuses_what_waited_too_long_for_a_process_that_stands_in() -> None:
    arbiter: InstanceArbiter[Any] = InstanceArbiter(stand_in=True)
    busy = Busy()
    arbiter.add(busy)
    assert arbiter.take(busy, inf) is busy
    instance = PythonInstance(
        "m_0",
        start_message(Path("/models/m/1"), CONFIG, "m_0"),
        CONFIG,
        "1",
        limits=ChildLimits(LONGEST_TURN_S - 0.05, 1.0, 1 << 20),
        metrics=MetricBook(),
        arbiter=arbiter,
        server_context=STANDALONE,
    )
    heard: list[object] = []

    def respond(answer: object, final: bool, parameters: object = None) -> None:
        heard.append((answer, final))

    inputs = {"x": Tensor(np.zeros(1, np.float32))}
    request = ExecuteRequest(inputs, frozenset("y"), respond, InferRequest("m", {}), Snapshot({}))
    instance.execute([request])
    ((answer, final),) = heard  # type: ignore[misc]
    error: EdgeServerError = answer
    assert final
    assert isinstance(error, Unavailable)
    assert str(error).startswith("Stub process 'm_0' is not healthy.")
