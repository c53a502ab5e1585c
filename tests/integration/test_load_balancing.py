"""Two servers behind gRPC's own load balancing, as docs/fleet.md has it: a rolling restart of both
fails no call. The balancer is that of the client; none stands between."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.adding_models import build, network
from support.daemon_process import Process
from support.free_ports import free_ports
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Iterator

DOC = Path(__file__).parents[2] / "docs/fleet.md"
WAIT_S = 60.0


def service_config() -> str:
    """The service config of docs/fleet.md."""
    (block,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    return json.dumps(json.loads(block))


class Servers:
    """Daemons with one model each, which adds the number of its server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = free_ports(2)
        self.running: list[Process] = []
        for number in range(2):
            build(folder / f"{number}/models/m", network(number))
            self.running.append(self._start(number))

    def _start(self, number: int) -> Process:
        folder = self._folder / str(number)
        process = Process(
            folder, f"--model-repository={folder / 'models'}", f"--grpc-port={self.ports[number]}"
        )
        process.wait_for("READY=1")
        return process

    def restart(self, number: int) -> None:
        assert self.running[number].terminate() == 0
        self.running[number].close()
        self.running[number] = self._start(number)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path)
    yield found
    for each in found.running:
        each.close()


def test_a_rolling_restart_fails_no_call(servers: Servers) -> None:
    target = ",".join(f"127.0.0.1:{port}" for port in servers.ports)
    client = triton.InferenceServerClient(
        f"ipv4:{target}", channel_args=[("grpc.service_config", service_config())]
    )
    x = triton.InferInput("x", [1], "FP32")
    x.set_data_from_numpy(np.zeros(1, np.float32))
    answers: list[float] = []
    failures: list[Exception] = []
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            try:
                answers.append(float(client.infer("m", [x]).as_numpy("y")[0]))
            except InferenceServerException as error:
                failures.append(error)

    def both_answer() -> None:
        """Wait until both servers have answered once more."""
        begin = len(answers)
        wait_until(lambda: {0.0, 1.0} <= {*answers[begin:]} or failures, WAIT_S)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    both_answer()
    for number in range(2):
        begin = len(answers)
        servers.restart(number)
        # The other one has answered throughout.
        assert float(1 - number) in answers[begin:]
        both_answer()
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    client.close()
    assert not failures, f"{len(failures)} of {len(answers)} calls: {failures[0]}"
