"""Runs as CUDA graphs, and without them where they cannot be; GPU and TensorRT are simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.workshop import Asked, add_one, infer, onnx_bytes

from edge_server.errors import DeviceLost, ModelConfigError
from edge_server.gpu.memory import BufferPool
from edge_server.gpu.stream import Stream
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.workshop import Workshop

X = np.arange(4, dtype=np.float32).reshape(1, 4)
BATCHES = [{"x": ((1, 4), (4, 4), (8, 4))}]
GRAPHS = "optimization { cuda { graphs: true %s } } "
OFF = 'parameters { key: "cuda_graphs" value { string_value: "false" } } '
NVDLA = "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 0 } } "
WITHOUT = "runs without CUDA graphs"


def graph_count(instance: Any) -> int:
    return len(instance._graphs._runs)


@pytest.mark.parametrize("gpu", ["integrated=1", "integrated=0"])
@pytest.mark.parametrize("version", ["8.6.1.6", "10.3.0.30"])
def test_a_plan_of_fixed_shapes_is_one_graph_by_default(
    workshop: Workshop, ask: Callable[..., Asked], gpu: str, version: str
) -> None:
    workshop.gpu.set(gpu)
    workshop.tensorrt(f"version={version}")
    workshop.write()
    instance = workshop.instance()
    assert graph_count(instance) == 1
    # What TensorRT is asked for from now on fails: graphs do not ask it.
    workshop.tensorrt("fail=enqueue:0")
    for i in range(3):
        np.testing.assert_array_equal(ask(instance, inputs={"x": X + i}).array(), X + i + 1)


@pytest.mark.parametrize(
    "text",
    [
        OFF,
        OFF + GRAPHS % "",
        # A recorded run has the usual priority.
        "optimization { priority: PRIORITY_MAX }",
    ],
)
def test_a_plan_of_fixed_shapes_is_no_graph_where_the_configuration_says_so(
    workshop: Workshop, ask: Callable[..., Asked], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    workshop.write()
    instance = workshop.instance(text)
    assert graph_count(instance) == workshop.gpu.graphs == 0
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)
    assert WITHOUT not in caplog.text


@pytest.mark.parametrize(("dla", "text"), [(True, NVDLA), (False, "max_batch_size: 8 ")])
def test_what_cannot_be_one_graph_has_none_and_no_line_says_so(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, dla: bool, text: str
) -> None:
    if dla:
        workshop.write(dla=True)
    else:
        workshop.write(add_one(("n", 4)), profiles=BATCHES)
    loaded = workshop.loaded(text)
    assert workshop.gpu.graphs == 0
    assert (loaded.degraded_reason(), WITHOUT in caplog.text) == ("", False)


def test_the_graphs_go_with_their_instance(workshop: Workshop) -> None:
    workshop.write()
    workshop.instance()
    assert workshop.gpu.graphs == 1
    workshop.unload()
    assert workshop.gpu.graphs == 0


def test_the_usual_batch_sizes_have_a_graph_and_the_others_run_without(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write(add_one(("n", 4)), profiles=BATCHES)
    instance = workshop.instance("max_batch_size: 8 dynamic_batching {} " + GRAPHS % "")
    # The preferred size, which is the largest: two in all, were there no dynamic batching there
    # would be those that Triton takes.
    assert graph_count(instance) == 1
    instance = workshop.instance("max_batch_size: 8 sequence_batching {} " + GRAPHS % "")
    assert [run.wanted.shapes["x"][0] for run in instance._graphs._runs] == [1, 2, 3, 4, 6, 8]
    for rows in range(1, 9):
        parts = np.random.default_rng(rows).random((rows, 4), np.float32)
        np.testing.assert_array_equal(ask(instance, inputs={"x": parts}).array(), parts + 1)


def test_a_graph_takes_and_gives_tensors_on_the_device(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write(add_one(("n", 4)), profiles=BATCHES)
    spec = "graph_spec { batch_size: 2 }"
    instance = workshop.instance("max_batch_size: 8 " + GRAPHS % spec)
    device = workshop.devices.gpu(0)
    pool, stream = BufferPool(device, 1 << 16, "test"), Stream(device)
    asked = []
    for i in range(2):
        array = pool.take(stream, (1, 4), np.float32)
        stream.to_device(array, X + 10 * i)
        array.written(stream)
        asked.append(Asked({"x": Tensor(array)}, on_device=True))
    instance.execute([each.request for each in asked])
    for i, each in enumerate(asked):
        assert each.answer["y"].on_device is not None
        np.testing.assert_array_equal(each.array(), X + 10 * i + 1)


def test_a_graph_with_a_lower_bound_serves_smaller_batches(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write(add_one(("n", 4)), profiles=BATCHES)
    spec = "graph_spec { batch_size: 4 graph_lower_bound { batch_size: 2 } }"
    instance = workshop.instance("max_batch_size: 8 " + GRAPHS % spec)
    workshop.tensorrt("fail=enqueue:0")
    for rows in (4, 2, 3):
        parts = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(ask(instance, inputs={"x": parts}).array(), parts + 1)
    # One row is below the bound: TensorRT is asked, and fails.
    assert "unable to enqueue" in str(ask(instance, inputs={"x": X}).answer)


def test_where_recording_is_refused_the_model_runs_without_and_one_line_says_so(
    workshop: Workshop, ask: Callable[..., Asked], caplog: pytest.LogCaptureFixture
) -> None:
    workshop.write(add_one(("n", 4)), profiles=BATCHES)
    workshop.tensorrt("capture=refused")
    instance = workshop.instance("max_batch_size: 8 " + GRAPHS % "")
    (line,) = (record.message for record in caplog.records if WITHOUT in record.message)
    assert "operation not permitted when stream is capturing" in line
    assert graph_count(instance) == workshop.gpu.graphs == 0
    for rows in (1, 8):
        parts = np.repeat(X, rows, 0)
        np.testing.assert_array_equal(ask(instance, inputs={"x": parts}).array(), parts + 1)


@pytest.mark.parametrize("broken", ["cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags"])
def test_what_the_driver_does_not_record_is_run_without_and_the_model_says_so(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    workshop.write()
    workshop.gpu.set(f"fail={broken}:900:0")
    loaded = workshop.loaded()
    assert loaded.degraded_reason().startswith(f"{WITHOUT}: GPU 0: record a graph: cu")
    assert caplog.text.count(WITHOUT) == 1
    response = infer(loaded, InferRequest("m", {"x": Tensor(X)}))
    np.testing.assert_array_equal(response.outputs["y"].array, X + 1)


def test_an_attempt_that_breaks_the_device_does_not_go_on(workshop: Workshop) -> None:
    workshop.write()
    workshop.tensorrt("fail=run:0")
    with pytest.raises(DeviceLost):
        workshop.instance(GRAPHS % "")
    workshop.forget()


def test_free_dimensions_have_no_graphs_before_tensorrt_10(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.tensorrt("version=8.6.1.6")
    workshop.write(add_one(("n", 4)), profiles=BATCHES)
    assert graph_count(workshop.instance("max_batch_size: 8 " + GRAPHS % "")) == 0
    assert "runs without CUDA graphs: TensorRT before 10 lets" in caplog.text


def test_an_output_whose_size_depends_on_the_data_is_not_recorded(
    workshop: Workshop, ask: Callable[..., Asked], caplog: pytest.LogCaptureFixture
) -> None:
    found = onnx_bytes(
        [helper.make_node("NonZero", ["x"], ["y"])],
        {"x": (TensorProto.FLOAT, (1, 4))},
        {"y": (TensorProto.INT64, (2, "found"))},
    )
    workshop.write(found, data_dependent=["y"])
    instance = workshop.instance(GRAPHS % "")
    assert WITHOUT in caplog.text
    assert ask(instance, inputs={"x": X}).array().shape == (2, 3)


@pytest.mark.parametrize(
    ("batch", "spec", "said"),
    [
        (8, "batch_size: 9", "graph spec expects 'batch_size' to be >= 1 and <= 8"),
        (8, "", "graph spec expects 'batch_size' to be >= 1 and <= 8"),
        (0, "batch_size: 1", "graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0"),
        (
            8,
            "batch_size: 2 graph_lower_bound { batch_size: 3 }",
            "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'",
        ),
        (
            8,
            'batch_size: 2 input { key: "x" value { dim: [4] } } '
            "graph_lower_bound { batch_size: 1 }",
            "graph lower bound spec expects shape for input 'x'",
        ),
        (
            8,
            'batch_size: 2 graph_lower_bound { input { key: "x" value { dim: [4, 4] } } }',
            "graph lower bound spec expects to have '1 dimensions, got 2",
        ),
        (
            8,
            'batch_size: 2 graph_lower_bound { input { key: "x" value { dim: [5] } } }',
            "graph lower bound spec expects input 'x' to have dimension <= 4",
        ),
        (8, 'batch_size: 2 input { key: "z" }', "graph spec names input 'z'"),
    ],
)
def test_a_graph_spec_that_cannot_be_is_told(
    workshop: Workshop, batch: int, spec: str, said: str
) -> None:
    shape, profiles = (("n", 4), BATCHES) if batch else ((1, 4), [])
    workshop.write(add_one(shape), profiles=profiles)
    with pytest.raises(ModelConfigError) as caught:
        workshop.instance(f"max_batch_size: {batch} {GRAPHS % ('graph_spec { ' + spec + ' }')}")
    assert said in str(caught.value)


def test_a_graph_that_is_not_launched_is_that_requests_failure_alone(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    instance = workshop.instance(GRAPHS % "")
    workshop.gpu.set("fail=cuGraphLaunch:1:0")
    said = "failed to run TRT inference: unable to execute graph for inference m_0: GPU 0: launch"
    assert str(ask(instance, inputs={"x": X}).answer).startswith(said)
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)


def test_what_runs_on_nvdla_is_not_recorded(
    workshop: Workshop, ask: Callable[..., Asked], caplog: pytest.LogCaptureFixture
) -> None:
    workshop.write(dla=True)
    instance = workshop.instance(NVDLA + GRAPHS % "")
    assert graph_count(instance) == 0
    assert f"{WITHOUT}: what runs on NVDLA cannot be recorded" in caplog.text
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)
