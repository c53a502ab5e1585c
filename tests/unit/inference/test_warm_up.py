"""Every instance has run every sample before it serves, or the model does not load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.model_configs import config_of

from edge_server.errors import EdgeServerError, InternalError, ModelConfigError
from edge_server.inference.scheduling import Scheduling, read_samples
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.model_config.config import ModelConfig, Placement


def config(samples: str, *, extra: str = "", tensor: str = "TYPE_FP32 dims: [ -1 ]") -> ModelConfig:
    text = (
        'name: "m" backend: "identity" instance_group { name: "m" count: 2 } '
        f'input {{ name: "a" data_type: {tensor} }} output {{ name: "b" data_type: {tensor} }} '
    )
    return config_of(text + extra + samples)


def sample(data: str, tensor: str = "TYPE_FP32 dims: [ 3 ]", extra: str = "") -> str:
    return (
        f'model_warmup {{ name: "w" {extra} inputs {{ key: "a" '
        f"value {{ data_type: {tensor} {data} }} }} }}"
    )


class Instance:
    """Notes what it runs, and fails when it shall."""

    def __init__(self, error: EdgeServerError | None = None) -> None:
        self.ran: list[np.ndarray] = []
        self.closed = False
        self._error = error

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        (request,) = requests
        self.ran.append(request.inputs["a"].array)
        request.respond(self._error or {"b": request.inputs["a"]}, True)

    def close(self) -> None:
        self.closed = True


class Model:
    def __init__(self, *errors: EdgeServerError | None) -> None:
        self.instances: list[Instance] = []
        self._errors = [*errors, None, None]

    def make_instance(self, name: str, placement: Placement) -> Instance:
        self.instances.append(Instance(self._errors[len(self.instances)]))
        return self.instances[-1]

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


def one(model_config: ModelConfig, folder: Path) -> np.ndarray:
    ((_, inputs),) = read_samples(model_config, folder)
    return inputs["a"].array


def test_every_instance_runs_every_sample_as_often_as_configured(tmp_path: Path) -> None:
    model = Model()
    samples = sample("zero_data: true", extra="count: 2") + sample("random_data: true")
    loaded = Scheduling().model(config(samples), 1, model, tmp_path)
    assert [len(instance.ran) for instance in model.instances] == [3, 3]
    assert model.instances[0].ran[0].tolist() == [0, 0, 0]
    counts = loaded.statistics.counts()
    assert (counts.execution_count, counts.success.count) == (0, 0)


def test_a_sample_that_fails_fails_the_load_and_closes_what_was_made(tmp_path: Path) -> None:
    model = Model(None, InternalError("too cold"))
    with pytest.raises(ModelConfigError) as caught:
        Scheduling().model(config(sample("zero_data: true")), 1, model, tmp_path)
    assert str(caught.value) == (
        "model 'm': warm-up sample 'w' failed: too cold; give it data that the model can work on, "
        "or remove that model_warmup"
    )
    assert [instance.closed for instance in model.instances] == [True, True]


@pytest.mark.parametrize(
    ("extra", "batch_size", "shape"),
    [
        ("", "", (3,)),
        ("", "batch_size: 1", (3,)),
        ("max_batch_size: 4 ", "", (1, 3)),
        ("max_batch_size: 4 ", "batch_size: 4", (4, 3)),
    ],
)
def test_a_batch_repeats_the_sample_where_the_model_batches(
    tmp_path: Path, extra: str, batch_size: str, shape: tuple[int, ...]
) -> None:
    configured = config(sample("random_data: true", extra=batch_size), extra=extra)
    array = one(configured, tmp_path)
    assert array.shape == shape
    assert len(np.unique(array.reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize("datatype", list(DataType))
@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true"])
def test_every_data_type_has_zeros_and_the_same_random_values_each_time(
    tmp_path: Path, datatype: DataType, data: str
) -> None:
    name = datatype.config_name
    configured = config(sample(data, f"{name} dims: [ 2, 3 ]"), tensor=f"{name} dims: [ 2, 3 ]")
    array = one(configured, tmp_path)
    assert (array.shape, array.dtype) == ((2, 3), datatype.numpy)
    assert array.tolist() == one(configured, tmp_path).tolist()


def test_a_file_gives_its_first_bytes(tmp_path: Path) -> None:
    np.arange(5, dtype="<f4").tofile(tmp_path / "data")
    assert one(config(sample('input_data_file: "data"')), tmp_path).tolist() == [0, 1, 2]


def test_a_file_of_texts_is_as_the_protocol_writes_them(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\2\0\0\0hi\0\0\0\0")
    configured = config(
        sample('input_data_file: "data"', "TYPE_STRING dims: [ 2 ]"),
        tensor="TYPE_STRING dims: [ -1 ]",
    )
    assert one(configured, tmp_path).tolist() == [b"hi", b""]


def test_a_reshaped_input_has_the_models_shape(tmp_path: Path) -> None:
    tensor = "TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] }"
    configured = config(sample("zero_data: true", "TYPE_FP32 dims: [ 4 ]"), tensor=tensor)
    assert one(configured, tmp_path).shape == (2, 2)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (
            sample('input_data_file: "short"'),
            "warmup setting expects 12 bytes, but the data provided from shortonly has 5 bytes",
        ),
        (sample('input_data_file: "none"'), "cannot be read: No such file or directory"),
        (sample("zero_data: true", "TYPE_INT32 dims: [ 3 ]"), "the model takes TYPE_FP32 [-1]"),
        (sample("zero_data: true", "TYPE_FP32 dims: [ 3, 3 ]"), "the model takes TYPE_FP32 [-1]"),
        (sample("zero_data: true", extra="batch_size: 2"), "batch_size 2 is more than"),
        ('model_warmup { name: "w" }', "gives no data for input 'a'"),
    ],
)
def test_a_sample_that_cannot_be_is_named_by_model_sample_and_remedy(
    tmp_path: Path, samples: str, expected: str
) -> None:
    folder = tmp_path / "warmup"
    folder.mkdir()
    (folder / "short").write_bytes(b"12345")
    with pytest.raises(ModelConfigError) as caught:
        read_samples(config(samples), folder)
    assert str(caught.value).startswith("model 'm': warm-up sample 'w': ")
    assert expected in str(caught.value)
