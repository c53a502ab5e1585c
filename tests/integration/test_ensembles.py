"""Ensembles over the wire: a stock client asks, a real daemon walks the graph."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.verb import ANY_PORTS, run_verb
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.daemon_process import Process

TIMEOUT_S = 30.0


def write(repository: Path, name: str, config: str) -> Path:
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    return directory


def tensor(kind: str, name: str, dims: str = "-1") -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'


def step(model: str, reads: dict[str, str], writes: dict[str, str]) -> str:
    text = f'step {{ model_name: "{model}" model_version: -1 '
    for kind, pairs in (("input_map", reads), ("output_map", writes)):
        for key, value in pairs.items():
            text += f'{kind} {{ key: "{key}" value: "{value}" }} '
    return text + "}\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`inner`: x → any → p, x → three → q. `outer`: x → inner → p → any → y, and q → z."""
    models = tmp_path / "models"
    for name, dims in (("any", "-1"), ("three", "3")):
        warm = (
            'model_warmup { name: "w" inputs { key: "a" value { data_type: TYPE_FP32 dims: 3 '
            'input_data_file: "data" } } }'
        )
        config = 'backend: "identity" response_cache { enable: true }'
        directory = write(
            models, name, config + tensor("input", "a", dims) + tensor("output", "b", dims) + warm
        )
        (directory / "warmup").mkdir()
        np.zeros(3, "<f4").tofile(directory / "warmup" / "data")
    inner = step("any", {"a": "x"}, {"b": "p"}) + step("three", {"a": "x"}, {"b": "q"})
    outer = step("inner", {"x": "x"}, {"p": "t", "q": "z"}) + step("any", {"a": "t"}, {"b": "y"})
    for name, outputs, steps in (("inner", "pq", inner), ("outer", "yz", outer)):
        io = tensor("input", "x") + "".join(tensor("output", output) for output in outputs)
        write(models, name, f'platform: "ensemble" {io} ensemble_scheduling {{ {steps} }}')
    return models


def ask(
    server: triton.InferenceServerClient, numbers: list[float], *outputs: str
) -> triton.InferResult:
    given = triton.InferInput("x", [len(numbers)], "FP32")
    given.set_data_from_numpy(np.array(numbers, np.float32))
    wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
    return server.infer("outer", [given], outputs=wanted, client_timeout=TIMEOUT_S)


def test_nested_and_parallel_steps_answer_many_clients_at_once(
    repository: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    server = client(start("--model-repository", str(repository)))
    wrong: list[object] = []

    def many(first: int) -> None:
        for number in range(first, first + 20):
            result = ask(server, [number, 1, 2])
            if [result.as_numpy(name).tolist() for name in "yz"] != [[number, 1, 2]] * 2:
                wrong.append(result.get_response())

    callers = [threading.Thread(target=many, args=(100 * index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(TIMEOUT_S)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


def test_an_output_alone_needs_only_its_own_branch_and_an_error_is_the_steps_own(
    repository: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    server = client(start("--model-repository", str(repository)))
    # `three` would refuse this length, and is not asked.
    result = ask(server, [1, 2], "y")
    assert result.as_numpy("y").tolist() == [1, 2]
    assert result.as_numpy("z") is None
    with pytest.raises(InferenceServerException) as caught:
        ask(server, [1, 2])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "unexpected shape for input 'a' for model 'three'. Expected [3], got [2]" in str(
        caught.value
    )


def test_a_model_that_cannot_be_warmed_up_does_not_load(repository: Path) -> None:
    (repository / "three" / "warmup" / "data").write_bytes(b"1234")
    done = run_verb("check", f"--model-repository={repository}", *ANY_PORTS)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "model 'three': warm-up sample 'w': warmup setting expects 12 bytes" in said


# Leaves `b` out where `a` is above 9; `o` is added where it is there.
CHOOSES = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "a").as_numpy()
            extra = pb_utils.get_input_tensor_by_name(request, "o")
            tensors = [pb_utils.Tensor("c", a + (extra.as_numpy() if extra else 0))]
            if a.flat[0] <= 9:
                tensors.append(pb_utils.Tensor("b", a))
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """`skips`: x → chooses → s → chooses as its optional input → y. `adds_batch`: x → batches → z,
    without a batch dimension of its own. `takes_batch`: x → plain → z, with one."""
    models = tmp_path / "models"
    io = tensor("input", "a", "4") + tensor("output", "b", "4")
    write(models, "batches", f'backend: "identity" max_batch_size: 8 {io}')
    write(models, "plain", f'backend: "identity" {io}')
    optional = 'input { name: "o" data_type: TYPE_FP32 dims: 4 optional: true }'
    directory = write(
        models, "chooses", f'backend: "python" {io} {optional}{tensor("output", "c", "4")}'
    )
    (directory / "1" / "model.py").write_text(CHOOSES)
    given = tensor("input", "x", "4")
    steps = step("chooses", {"a": "x"}, {"b": "s"})
    steps += step("chooses", {"a": "x", "o": "s"}, {"c": "y", "b": "z"})
    outputs = tensor("output", "y", "4") + tensor("output", "z", "4")
    write(
        models,
        "skips",
        f'platform: "ensemble" {given}{outputs} ensemble_scheduling {{ {steps} }}',
    )
    for name, member, size in (("adds_batch", "batches", 0), ("takes_batch", "plain", 8)):
        write(
            models,
            name,
            f'platform: "ensemble" max_batch_size: {size} {given}{tensor("output", "z", "4")}'
            f"ensemble_scheduling {{ {step(member, {'a': 'x'}, {'b': 'z'})} }}",
        )
    return models


def test_ensembles_add_a_batch_of_1_skip_what_is_left_out_and_return_the_sequence(
    mixed: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    server = client(start("--model-repository", str(mixed)))

    def ask_for(model: str, numbers: list[float], *shape: int, **more: int) -> triton.InferResult:
        given = triton.InferInput("x", shape, "FP32")
        given.set_data_from_numpy(np.array(numbers, np.float32).reshape(shape))
        return server.infer(model, [given], client_timeout=TIMEOUT_S, **more)

    four = [1.0, 2.0, 3.0, 4.0]
    for model, shape in (("adds_batch", (4,)), ("takes_batch", (1, 4))):
        result = ask_for(model, four, *shape)
        assert result.as_numpy("z").shape == shape
        assert result.as_numpy("z").flatten().tolist() == four
    with pytest.raises(InferenceServerException, match=r"Expected \[4\], got \[2,4\]"):
        ask_for("takes_batch", four * 2, 2, 4)

    result = ask_for("skips", four, 4)
    assert result.as_numpy("y").tolist() == [2 * number for number in four]
    assert result.as_numpy("z").tolist() == four
    result = ask_for("skips", [10, 2, 3, 4], 4)
    assert result.as_numpy("y").tolist() == [10, 2, 3, 4]
    assert result.as_numpy("z") is None

    parameters = ask_for("skips", four, 4, sequence_id=7, sequence_start=True).get_response()
    assert {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in parameters.parameters.items()
    } == {"sequence_id": 7, "sequence_start": True, "sequence_end": False}
    assert server.get_model_config("skips").config.HasField("model_transaction_policy")
