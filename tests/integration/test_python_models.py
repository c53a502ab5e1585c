"""Triton's own kind of `model.py`, unchanged, through the real daemon and the real client."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.processes import is_running
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.daemon_process import Process

TIMEOUT_S = 30.0

ADD_SUB_CONFIG = """
backend: "python"
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
instance_group [{ kind: KIND_CPU }]
"""
ADD_SUB = '''
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Your Python model must use the same class name."""

    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        output0_config = pb_utils.get_output_config_by_name(model_config, "OUTPUT0")
        output1_config = pb_utils.get_output_config_by_name(model_config, "OUTPUT1")
        self.output0_dtype = pb_utils.triton_string_to_numpy(output0_config["data_type"])
        self.output1_dtype = pb_utils.triton_string_to_numpy(output1_config["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            out_0, out_1 = (
                in_0.as_numpy() + in_1.as_numpy(),
                in_0.as_numpy() - in_1.as_numpy(),
            )
            out_tensor_0 = pb_utils.Tensor("OUTPUT0", out_0.astype(self.output0_dtype))
            out_tensor_1 = pb_utils.Tensor("OUTPUT1", out_1.astype(self.output1_dtype))
            inference_response = pb_utils.InferenceResponse(
                output_tensors=[out_tensor_0, out_tensor_1]
            )
            responses.append(inference_response)
        return responses

    def finalize(self):
        print("Cleaning up...")
'''
# No config.pbtxt: it says itself what it takes.
UPPER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        auto_complete_model_config.add_input(
            {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [-1]})
        auto_complete_model_config.add_output(
            {"name": "UPPER", "data_type": "TYPE_STRING", "dims": [-1]})
        auto_complete_model_config.set_max_batch_size(8)
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            upper = np.array([t.decode().upper() for t in text.flat], dtype=np.object_)
            tensor = pb_utils.Tensor("UPPER", upper.reshape(text.shape))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
WILLING_CONFIG = """
backend: "python"
input { name: "ACT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] }
"""
# Starts once there is no file `@hold`.
WILLING = """
import os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        while os.path.exists("@hold"):
            time.sleep(0.01)

    def execute(self, requests):
        act = pb_utils.get_input_tensor_by_name(requests[0], "ACT").as_numpy()[0].decode()
        if act == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if act == "raise":
            raise pb_utils.TritonModelException("as asked")
        while act == "hang":
            pass
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", np.array([os.getpid()]))])]
"""
BLS_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 1, 4 ] }
output { name: "sync" data_type: TYPE_FP32 dims: [ 1, 4 ] }
output { name: "async" data_type: TYPE_FP32 dims: [ 1, 4 ] }
"""
BLS = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            ask = lambda: pb_utils.InferenceRequest(
                model_name="add_one", requested_output_names=["y"], inputs=[x])
            sync = ask().exec()
            first, second = await asyncio.gather(ask().async_exec(), ask().async_exec())
            if sync.has_error():
                raise pb_utils.TritonModelException(sync.error().message())
            made = [pb_utils.get_output_tensor_by_name(r, "y").as_numpy()
                    for r in (sync, first, second)]
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("sync", made[0]),
                pb_utils.Tensor("async", made[1] + made[2])]))
        return responses
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


def write(repository: Path, name: str, config: str, source: str) -> None:
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    if config:
        (directory / "config.pbtxt").write_text(config)
    (directory / "1" / "model.py").write_text(source)


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def act(connection: Any, what: str, **more: Any) -> int:
    inputs = [tensor("ACT", np.array([what.encode()], np.object_))]
    return int(connection.infer("willing", inputs, **more).as_numpy("PID")[0])


def wait_until_ready(connection: Any, model: str) -> None:
    wait_until(lambda: connection.is_model_ready(model), TIMEOUT_S)


def test_unchanged_models_serve_the_stock_client(
    repository: Path,
    start: Callable[..., Process],
    client: Callable[[Process], Any],
    write_onnx: Callable[..., None],
) -> None:
    write(repository, "add_sub", ADD_SUB_CONFIG, ADD_SUB)
    write(repository, "upper", "", UPPER)
    write(repository, "bls", BLS_CONFIG, BLS)
    write_onnx(repository / "add_one" / "1" / "model.onnx")
    process = start(f"--model-repository={repository}")
    connection = client(process)

    a, b = np.random.default_rng(7).random((2, 4), np.float32)
    result = connection.infer("add_sub", [tensor("INPUT0", a), tensor("INPUT1", b)])
    assert np.array_equal(result.as_numpy("OUTPUT0"), a + b)
    assert np.array_equal(result.as_numpy("OUTPUT1"), a - b)

    metadata = connection.get_model_metadata("upper")
    assert metadata.platform == "python"
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("TEXT", "BYTES", [-1, -1])
    ]
    text = np.array([["straße".encode(), b""], [b"a", b"bc"]], np.object_)
    result = connection.infer("upper", [tensor("TEXT", text)])
    assert result.as_numpy("UPPER").tolist() == [[b"STRASSE", b""], [b"A", b"BC"]]

    x = np.array([[1, 2, 3, 4]], np.float32)
    result = connection.infer("bls", [tensor("x", x)])
    assert np.array_equal(result.as_numpy("sync"), x + 1)
    assert np.array_equal(result.as_numpy("async"), 2 * (x + 1))

    assert process.terminate() == 0
    assert "Cleaning up..." in process.log.read_text()


def test_a_crash_and_a_hang_cost_their_request_and_readiness_is_true(
    repository: Path,
    start: Callable[..., Process],
    client: Callable[[Process], Any],
    tmp_path: Path,
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    hold = gates / "hold"
    config = tmp_path / "config.toml"
    config.write_text(f'[repository]\npaths = ["{repository}"]\n[python]\nreadable = ["{gates}"]\n')
    write(repository, "willing", WILLING_CONFIG, WILLING.replace("@hold", str(hold)))
    write(repository, "add_sub", ADD_SUB_CONFIG, ADD_SUB)
    connection = client(start(f"--config={config}"))
    first = act(connection, "fine")

    with pytest.raises(InferenceServerException, match="TritonModelException: as asked") as raised:
        act(connection, "raise")
    assert raised.value.status() == "StatusCode.INTERNAL"
    assert act(connection, "fine") == first

    hold.touch()
    with pytest.raises(
        InferenceServerException, match=r"is not healthy.*died of SIGSEGV"
    ) as raised:
        act(connection, "crash")
    assert raised.value.status() == "StatusCode.INTERNAL"
    assert not connection.is_model_ready("willing")
    assert connection.is_model_ready("add_sub")
    hold.unlink()
    wait_until_ready(connection, "willing")
    second = act(connection, "fine")
    assert second != first

    hold.touch()
    with pytest.raises(InferenceServerException) as raised:
        act(connection, "hang", client_timeout=0.5)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    wait_until(lambda: not connection.is_model_ready("willing"), TIMEOUT_S)
    hold.unlink()
    wait_until_ready(connection, "willing")
    assert act(connection, "fine") != second


@pytest.mark.parametrize(
    ("models", "kind"),
    [
        (1, "instance_group [{ kind: KIND_CPU count: 8 }]"),
        pytest.param(
            1,
            "instance_group [{ kind: KIND_CPU count: 8 }] sequence_batching { }",
            marks=pytest.mark.long,
        ),
        pytest.param(
            1,
            "instance_group [{ kind: KIND_CPU count: 8 }] max_batch_size: 2 dynamic_batching { }",
            marks=pytest.mark.long,
        ),
        pytest.param(8, "", marks=pytest.mark.long),
    ],
    ids=["direct", "sequences", "batches", "models"],
)
def test_eight_that_do_not_finalize_cost_the_time_of_one(
    repository: Path, start: Callable[..., Process], models: int, kind: str
) -> None:
    # systemd kills what takes longer.
    unit = (Path(__file__).parents[2] / "systemd" / "edge-server.service").read_text()
    (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    for number in range(models):
        source = WILLING + "    def finalize(self):\n        time.sleep(600)\n"
        write(repository, f"m{number}", WILLING_CONFIG + kind, "import time\n" + source)
    process = start(f"--model-repository={repository}")
    begun = time.monotonic()
    assert process.terminate() == 0
    assert time.monotonic() - begun < float(limit_s)
    assert process.log.read_text().count("'finalize' did not return within") == 8


def test_nothing_outlives_a_daemon_that_is_killed(
    repository: Path, start: Callable[..., Process], client: Callable[[Process], Any]
) -> None:
    write(repository, "willing", WILLING_CONFIG, WILLING)
    process = start(f"--model-repository={repository}")
    connection = client(process)
    pid = act(connection, "fine")
    with pytest.raises(InferenceServerException):
        act(connection, "hang", client_timeout=0.2)
    process.popen.kill()
    wait_until(lambda: not is_running(pid), TIMEOUT_S)
