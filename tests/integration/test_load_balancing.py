"""Several servers behind gRPC's own load balancing, as docs/fleet.md has it, and behind nginx: a
rolling restart fails no call, sequences stay on one server, and shared memory is each one's."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.adding_models import build, network
from support.several_servers import Nginx, Servers
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException, shared_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs/fleet.md"
SEQUENCES = ROOT / "examples/models/simple_sequence"
WAIT_S = 60.0


def service_config() -> str:
    """The service config of docs/fleet.md."""
    (block,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    return json.dumps(json.loads(block))


@pytest.fixture
def start_servers(tmp_path: Path) -> Iterator[Callable[[int], Servers]]:
    """Starts so many servers, each with a model that adds the server's number, and sequences."""
    made: list[Servers] = []

    def build_repository(folder: Path, number: int) -> None:
        build(folder / "m", network(number))
        shutil.copytree(SEQUENCES, folder / SEQUENCES.name)

    def start(count: int) -> Servers:
        made.append(Servers(tmp_path, count, build_repository))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def start_nginx(tmp_path: Path) -> Iterator[Callable[[Servers], Nginx]]:
    made: list[Nginx] = []

    def start(servers: Servers) -> Nginx:
        made.append(Nginx(tmp_path / "nginx", servers.ports))
        return made[-1]

    yield start
    for each in made:
        each.close()


class Calls:
    """Calls of four threads that go on until `end`.

    Attributes:
        answers: the numbers of the servers that answered.
    """

    def __init__(self, target: str, config: str) -> None:
        self.answers: list[float] = []
        self._failures: list[Exception] = []
        self._over = threading.Event()
        self._client = triton.InferenceServerClient(
            target, channel_args=[("grpc.service_config", config)]
        )
        self._threads = [threading.Thread(target=self._call) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        x = triton.InferInput("x", [1], "FP32")
        x.set_data_from_numpy(np.zeros(1, np.float32))
        while not self._over.wait(0.01):  # 400 calls a second, which leave the servers a processor
            try:
                self.answers.append(float(self._client.infer("m", [x]).as_numpy("y")[0]))
            except InferenceServerException as error:
                self._failures.append(error)

    def wait_for(self, *numbers: int) -> None:
        """Wait until these servers have answered once more."""
        begin = len(self.answers)
        wait_until(lambda: {*numbers} <= {*self.answers[begin:]} or self._failures, WAIT_S)

    def end(self) -> None:
        """None of all calls has failed."""
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._client.close()
        said = f"{len(self._failures)} of {len(self.answers)} calls: {self._failures[:1]}"
        assert not self._failures, said


def test_a_rolling_restart_fails_no_call(start_servers: Callable[[int], Servers]) -> None:
    servers = start_servers(2)
    target = ",".join(f"127.0.0.1:{port}" for port in servers.ports)
    calls = Calls(f"ipv4:{target}", service_config())
    calls.wait_for(0, 1)
    for number in range(2):
        begin = len(calls.answers)
        servers.restart(number)
        # The other one has answered throughout.
        assert float(1 - number) in calls.answers[begin:]
        calls.wait_for(0, 1)
    calls.end()


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_behind_nginx_a_server_stops_without_a_failed_call_of_a_client_that_tries_again(
    start_servers: Callable[[int], Servers], start_nginx: Callable[[Servers], Nginx], count: int
) -> None:
    servers = start_servers(count)
    nginx = start_nginx(servers)
    config = json.loads(service_config())
    del config["loadBalancingConfig"], config["healthCheckConfig"]
    calls = Calls(f"127.0.0.1:{nginx.port}", json.dumps(config))
    calls.wait_for(*range(count))
    for number in range(count):
        servers.stop(number)
        # Otherwise it has calls as soon as it listens, and its models are not there yet.
        nginx.reload(servers.ports[number])
        servers.start(number)
        nginx.reload()
        calls.wait_for(*range(count))
    calls.end()


@pytest.mark.long
def test_a_server_that_nginx_no_longer_uses_stops_without_a_failed_call_of_any_client(
    start_servers: Callable[[int], Servers], start_nginx: Callable[[Servers], Nginx]
) -> None:
    servers = start_servers(2)
    nginx = start_nginx(servers)
    calls = Calls(f"127.0.0.1:{nginx.port}", "{}")
    calls.wait_for(0, 1)
    for number in range(2):
        nginx.reload(servers.ports[number])
        # Until the workers of the configuration before have ended their calls.
        begin = len(calls.answers)

        def is_left(begin: int = begin, number: int = number) -> bool:
            recent = calls.answers[begin:][-200:]
            return len(recent) == 200 and number not in recent

        wait_until(is_left, WAIT_S)
        servers.restart(number)
        nginx.reload()
        calls.wait_for(0, 1)
    calls.end()


@pytest.mark.long
def test_behind_nginx_calls_of_a_sequence_reach_one_server(
    start_servers: Callable[[int], Servers], start_nginx: Callable[[Servers], Nginx]
) -> None:
    nginx = start_nginx(start_servers(2))
    client = triton.InferenceServerClient(f"127.0.0.1:{nginx.port}")
    one = triton.InferInput("INPUT", [1, 1], "INT32")
    one.set_data_from_numpy(np.ones((1, 1), np.int32))
    sequences = range(1, 17)
    for sequence in sequences:
        for index in range(4):
            answer = client.infer(
                "simple_sequence",
                [one],
                sequence_id=sequence,
                sequence_start=index == 0,
                sequence_end=index == 3,
                headers={"x-sequence": str(sequence)},
            )
            assert answer.as_numpy("OUTPUT") == index + 1
    counts = []
    for port in nginx.ports:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as direct:
            found = direct.get_inference_statistics("simple_sequence").model_stats[0]
            counts.append(found.inference_count)
    client.close()
    assert sum(counts) == 64
    assert all(counts), counts


@pytest.mark.long
def test_behind_nginx_shared_memory_is_registered_with_each_server(
    start_servers: Callable[[int], Servers], start_nginx: Callable[[Servers], Nginx], tmp_path: Path
) -> None:
    servers = start_servers(2)
    nginx = start_nginx(servers)
    key = f"/edge_balanced_{os.getpid()}"
    region = shared_memory.create_shared_memory_region("balanced", key, 4)
    try:
        shared_memory.set_shared_memory_region(region, [np.array([5], np.float32)])
        for port in servers.ports:
            with triton.InferenceServerClient(f"127.0.0.1:{port}") as direct:
                direct.register_system_shared_memory("balanced", key, 4)
        x = triton.InferInput("x", [1], "FP32")
        x.set_shared_memory("balanced", 4)
        with triton.InferenceServerClient(f"127.0.0.1:{nginx.port}") as client:
            answers = {float(client.infer("m", [x]).as_numpy("y")[0]) for _ in range(50)}
    finally:
        shared_memory.destroy_shared_memory_region(region)
    assert answers == {5.0, 6.0}
