"""Callers that give up leave nothing of their requests in the lines of the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as triton
from integration.test_sequences import write_model
from onnx import helper as onnx_helper
from support.processes import resident_bytes
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.polling_server import Server

TIMEOUT_S = 60.0
REQUESTS = 100
# At once.
CALLERS = 5
# 4 MiB of FP32.
ELEMENTS = 1 << 20
MIB = 1 << 20

# One slot, which a sequence holds that goes on.
SLOT = """
max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU count: 1 }
sequence_batching { max_sequence_idle_microseconds: 3600000000 }
"""


def start_sequence(
    client: triton.InferenceServerClient, number: int, elements: int, timeout_s: float
) -> None:
    x = triton.InferInput("x", [1, elements], "FP32")
    x.set_data_from_numpy(np.ones((1, elements), np.float32))
    client.infer("slot", [x], sequence_id=number, sequence_start=True, client_timeout=timeout_s)


def test_sequences_that_wait_for_a_slot_leave_nothing_once_their_callers_are_gone(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    nodes = [onnx_helper.make_node("ReduceSum", ["x"], ["y"], keepdims=1)]
    write_model(tmp_path / "repository" / "slot", SLOT, nodes, {"x": "n"}, {"y": 1})  # type: ignore[dict-item]  # a length without a name
    server = serve()
    start_sequence(server.client, 1, 1, TIMEOUT_S)
    before_bytes = resident_bytes(server.process.popen.pid)

    def give_up(number: int) -> None:
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            start_sequence(server.client, 2 + number, ELEMENTS, 0.1)

    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(give_up, range(REQUESTS)))
    pending = 'nv_inference_pending_request_count{model="slot",version="1"}'
    wait_until(lambda: not server.metric(pending), TIMEOUT_S, every_s=0.1)
    grown_bytes = resident_bytes(server.process.popen.pid) - before_bytes
    # What waited at once, and what the allocator keeps; not the 400 MiB of all of them.
    assert grown_bytes < 200 * MIB
    start_sequence(server.client, 1, 1, TIMEOUT_S)
