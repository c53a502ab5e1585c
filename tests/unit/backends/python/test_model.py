"""A batch goes to its own process, and to another only while its own is down."""

from __future__ import annotations

import os
import socket
import threading
import time
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from google.protobuf import text_format
from support.waiting import TIMEOUT_S
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import ExecuteRequest
from edge_server.backends.python import backend
from edge_server.backends.python.backend import PythonInstance, PythonModel
from edge_server.backends.python.context import ModelContext, PythonParameters
from edge_server.backends.python.messages import FromChild
from edge_server.backends.python.session import ChildSession
from edge_server.backends.python.shared_memory import ArenaWriter, make_arena_file
from edge_server.errors import DeadlineExceeded, ModelLoadError, Unavailable
from edge_server.inference.registry import Snapshot
from edge_server.model_config.config import ModelConfig
from edge_server.process.child import Channel
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

CONFIG, SEQUENCES = (
    ModelConfig.of(text_format.Parse(f'name: "m" backend: "python" {more}', pb.ModelConfig()))
    for more in ("", "sequence_batching { }")
)


class Process:
    def __init__(self, *, up: bool = True) -> None:
        self.up = up


def model_of(*processes: Process, sequences: bool = False) -> Any:
    config = SEQUENCES if sequences else CONFIG
    model: Any = PythonModel(ModelContext(Path("/m/1"), config, PythonParameters()))
    model.instances += processes
    return model


def test_its_own_process_goes_first() -> None:
    own, other = Process(), Process()
    assert model_of(other, own).lend(own, inf) is own


def test_another_stands_in_while_its_own_is_down() -> None:
    own, other = Process(up=False), Process()
    assert model_of(own, other).lend(own, inf) is other


def test_none_is_taken_where_none_is_up() -> None:
    own, other = Process(up=False), Process(up=False)
    assert model_of(own, other).lend(own, inf) is None


def test_nothing_stands_in_for_what_keeps_state() -> None:
    own, other = Process(up=False), Process()
    assert model_of(own, other, sequences=True).lend(own, inf) is None


def test_no_process_has_two_batches_at_once() -> None:
    own, other = Process(up=False), Process()
    model = model_of(own, other)
    model.lend(other, inf)
    with pytest.raises(DeadlineExceeded):
        model.lend(own, time.monotonic())
    taken: list[Process | None] = []
    thread = threading.Thread(target=lambda: taken.append(model.lend(own, inf)))
    thread.start()
    model.give_back(other)
    thread.join(TIMEOUT_S)
    assert taken == [other]


def test_whoever_waits_is_served_by_what_comes_back() -> None:
    own, other = Process(up=False), Process()
    model = model_of(own, other)
    model.lend(other, inf)
    taken: list[Process | None] = []
    thread = threading.Thread(target=lambda: taken.append(model.lend(own, inf)))
    thread.start()
    own.up = True
    model.changed()
    thread.join(TIMEOUT_S)
    assert taken == [own]


def test_a_batch_too_long_for_a_message_is_refused_and_leaves_nothing() -> None:
    here, there = socket.socketpair()
    fd = make_arena_file("outbox", 1 << 20)
    process: Any = Mock(outbox=ArenaWriter(fd), cpu_s=lambda: 0.0)
    process.channel = Channel(here, FromChild, longest_sent_bytes=1000)
    context = ModelContext(Path("/m/1"), CONFIG, PythonParameters())
    session = ChildSession("m_0", context, process)
    responses: list[str] = []
    request = ExecuteRequest(
        {"x": Tensor(np.zeros(8, np.uint8))},
        frozenset(),
        lambda made, final, _parameters=None: responses.append(f"{made} {final}"),
        InferRequest("m", {}, parameters={"p": "x" * 2000}),
        Snapshot({}),
    )
    with here, there:
        session.execute([request])
    os.close(fd)
    assert responses == [
        "model 'm': names, texts and parameters of 2042 bytes at once; at most 1000 are taken True"
    ]
    assert session.not_ready_reason() == ""
    assert not session._in_flight.callers()
    assert process.outbox.put(np.zeros((1 << 20) - 64, np.uint8)) == 64


def test_a_process_that_cannot_be_started_for_whatever_reason_fails_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `instance_group { name: "a\\000b" }`."""
    start = Mock(side_effect=ValueError("embedded null byte"))
    monkeypatch.setattr(backend, "ChildProcess", start)
    context = ModelContext(Path("/m/1"), CONFIG, PythonParameters())
    instance = PythonInstance("a\0b_0", context, PythonModel(context))
    errors: list[str] = []

    def load() -> None:
        try:
            instance.open()
        except ModelLoadError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert errors == [
        "/m/1/: instance 'a\0b_0' does not start: its process cannot be started: embedded null byte"
    ]


def test_it_refuses_what_waited_too_long_for_a_process_that_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "LONGEST_WAIT_S", 0.05)
    busy = Process()
    model = model_of(busy)
    assert model.lend(busy, inf) is busy
    context = ModelContext(Path("/models/m/1"), CONFIG, PythonParameters())
    instance = PythonInstance("m_0", context, model)
    responses: list[tuple[object, bool]] = []

    def respond(response: object, final: bool, parameters: object = None) -> None:
        responses.append((response, final))

    inputs = {"x": Tensor(np.zeros(1, np.float32))}
    request = ExecuteRequest(inputs, frozenset("y"), respond, InferRequest("m", {}), Snapshot({}))
    instance.execute([request])
    response, final = responses[0]
    assert len(responses) == 1
    assert final
    assert isinstance(response, Unavailable)
    assert str(response).startswith("Stub process 'm_0' is not healthy.")
