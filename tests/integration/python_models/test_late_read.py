"""A response that a process has sent in time is read, however late the daemon gets to it."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.waiting import TIMEOUT_S
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.python import messages as m
from edge_server.backends.python.context import ModelContext, ModelLog, PythonParameters
from edge_server.backends.python.session import ChildProcess
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.parse import read_model_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def process() -> Iterator[ChildProcess]:
    config = ModelConfig.of(pb.ModelConfig(name="m"))
    context = ModelContext(Path("m/1"), config, PythonParameters(shared_memory_limit_mib=1))
    process = ChildProcess("m", context, ModelLog("m"))
    yield process
    process.kill()
    process.ending()


@pytest.fixture
def start(write: Callable[..., Path]) -> Callable[[str], m.Start]:
    """Makes the first message to a model with these lines in `auto_complete_config`."""

    def make(*lines: str) -> m.Start:
        body = "\n    ".join(
            ("@staticmethod", "def auto_complete_config(config):", *lines, "return config")
        ).replace("    def", "def", 1)
        directory = write(m=body) / "m" / "1"
        config = read_model_config(directory.parent / "config.pbtxt")
        config.default_model_filename = "model.py"
        context = ModelContext(directory, ModelConfig.of(config), PythonParameters())
        start = context.start(complete=True)
        # In a closed sandbox the process would wait for decisions of the stalled daemon.
        return msgspec.structs.replace(start, rules=m.SandboxRules())

    return make


@pytest.mark.parametrize("completed_bytes", [0, 100_000])
def test_a_response_that_came_while_the_daemon_stalled_past_its_limit_is_returned(
    process: ChildProcess, start: Callable[..., m.Start], completed_bytes: int
) -> None:
    """Also one that takes more than one read."""
    message = start(
        "print('printed')",
        "pb_utils.Logger.log_info('logged')",
        f"config._model_config['name'] = 'n' * {completed_bytes}",
    )
    send = process.channel.send

    def send_and_stall(message: m.Start) -> None:
        send(message)
        end = time.monotonic() + TIMEOUT_S
        arrived = b""
        # The end of the completed configuration is that of the response.
        while b"Started" not in arrived or not arrived.endswith(b"}"):
            arrived = process.connection.recv(1 << 20, socket.MSG_PEEK)
            assert time.monotonic() < end
            time.sleep(0.01)

    process.channel.send = send_and_stall
    started = process.start(message, 0.0, other=lambda other: None)
    assert started is not None
    assert not started.failure


def test_a_process_that_only_logs_is_given_up_at_the_limit(
    process: ChildProcess, start: Callable[..., m.Start]
) -> None:
    message = start("while True: pb_utils.Logger.log_info('l' * 8000)")
    assert process.start(message, 1.0, other=lambda other: None) is None
