"""Files and parameters: what is wrong with them is told, what is right is run."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from unit.backends.onnxruntime.graphs import answer, answered, config

from edge_server.backends import onnxruntime
from edge_server.backends.contract import LoadContext
from edge_server.errors import InternalError, ModelConfigError
from edge_server.gpu.device import Devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.model_config.files import ModelFiles


@pytest.mark.parametrize("keep", [0, 40, 0.9])
def test_a_file_cut_short_is_named_with_the_remedy(
    files: ModelFiles, write_onnx: Callable[..., None], keep: float
) -> None:
    path = files.versions[1] / "model.onnx"
    write_onnx(path, (1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(ModelConfigError, match=r"model\.onnx: ONNX Runtime cannot load it: .*copy"):
        onnxruntime.complete(files, 1, config(""))


def test_weights_outside_the_models_directory_are_refused_without_where_they_are(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    path = files.versions[1] / "model.onnx"
    write_onnx(path, (1, 4))
    model = onnx.load(path)
    outside = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    outside.external_data.add(key="location", value="../../weights")
    model.graph.initializer.append(outside)
    model.graph.node[0].input[-1] = "w"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelConfigError, match="cannot load it") as caught:
        onnxruntime.complete(files, 1, config(""))
    assert str(path.parent.parent.parent / "weights") not in str(caught.value)


def test_a_missing_file_is_named(files: ModelFiles) -> None:
    with pytest.raises(ModelConfigError, match=r"model\.onnx: missing"):
        onnxruntime.complete(files, 1, config(""))


def test_a_file_that_cannot_be_read_is_not_to_be_exported_again(
    files: ModelFiles, unreadable: Callable[[Path], None]
) -> None:
    unreadable(files.versions[1] / "model.onnx")
    with pytest.raises(ModelConfigError, match=r"model\.onnx: cannot be read: File name too long"):
        onnxruntime.complete(files, 1, config(""))


def test_a_directory_of_the_models_name_holds_it(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx" / "model.onnx", (1, 4))
    completed = onnxruntime.complete(files, 1, config(""))
    made = answer(completed, files.versions[1], np.zeros((1, 4), np.float32))
    assert made["y"].array.tolist() == [[1, 1, 1, 1]]


def test_its_memory_is_at_least_its_file_with_external_data_and_without_other_models(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    directory = files.versions[1]
    write_onnx(directory / "model.onnx", (1, 4))
    file_bytes = (directory / "model.onnx").stat().st_size
    (directory / "model.onnx.data").write_bytes(bytes(100))
    (directory / "model_int8.onnx").write_bytes(bytes(10_000))
    completed = onnxruntime.complete(files, 1, config(""))
    model = onnxruntime.load(LoadContext(directory, completed, Devices()))
    assert model.memory_bytes() == {"file": file_bytes + 100}


def test_parameters_are_checked_before_the_model_is_loaded(files: ModelFiles) -> None:
    said = 'parameters { key: "execution_mode" value { string_value: "2" } }'
    with pytest.raises(ModelConfigError, match=r"config\.pbtxt: parameters: .*`\$.execution_mode`"):
        onnxruntime.complete(files, 1, config(said))


def test_a_parameter_of_others_is_logged_and_does_no_harm(
    files: ModelFiles, write_onnx: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    said = 'parameters { key: "gpu_mem_limit" value { string_value: "5" } }'
    completed = onnxruntime.complete(files, 1, config(said))
    assert completed.parameters == {"gpu_mem_limit": "5"}
    assert caplog.messages[0].startswith("model m: parameter 'gpu_mem_limit' has no effect here")
    onnxruntime.load(LoadContext(files.versions[1], completed, Devices())).close()


@pytest.mark.parametrize("name", ["golden_max_latency_ms", "allow_interface_change", "task"])
def test_a_parameter_of_every_model_is_not_called_without_effect(
    files: ModelFiles,
    write_onnx: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    given = f'parameters {{ key: "{name}" value {{ string_value: "5" }} }}'
    onnxruntime.complete(files, 1, config(given))
    assert not caplog.messages


def test_every_option_is_one_that_the_runtime_takes(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    options = {
        "intra_op_thread_count": "1",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "1",
        "enable_mem_pattern": "0",
        "memory.enable_memory_arena_shrinkage": "cpu:0",
        "allow_spinning": "true",
    }
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    for level in (-1, 1, 2):
        text = f"optimization {{ graph {{ level: {level} }} }}" + "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in options.items()
        )
        completed = onnxruntime.complete(files, 1, config(text))
        made = answer(completed, files.versions[1], np.zeros((1, 4), np.float32))
        assert made["y"].array.tolist() == [[1, 1, 1, 1]]


def test_it_computes_and_a_runtime_failure_is_an_internal_error(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    completed = onnxruntime.complete(files, 1, config(""))
    made = answer(completed, files.versions[1], np.zeros((1, 4), np.float32))
    assert made["y"].array.tolist() == [[1, 1, 1, 1]]
    failed = answer(completed, files.versions[1], np.zeros((2, 4), np.float32))
    assert isinstance(failed, InternalError)
    assert "model 'm' failed" in str(failed)


def test_runs_from_before_an_interruption_end_with_an_error_and_later_ones_go_on(
    files: ModelFiles, write_onnx: Callable[..., None]
) -> None:
    write_onnx(files.versions[1] / "model.onnx", (1, 4))
    completed = onnxruntime.complete(files, 1, config(""))
    context = LoadContext(files.versions[1], completed, Devices())
    model = onnxruntime.load(context)
    model.interrupt(time.monotonic())
    made = answered(model, np.zeros((1, 4), np.float32))
    assert made["y"].array.tolist() == [[1, 1, 1, 1]]
    model.interrupt(inf)
    failed = answered(model, np.zeros((1, 4), np.float32))
    assert str(failed) == (
        "model 'm': the run hung and was ended; send other inputs, or correct the model"
    )
    assert isinstance(failed, InternalError)
