"""What an instance does with a batch; GPU and TensorRT are simulated."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.workshop import Asked, add_one, infer, onnx_bytes, two_inputs

from edge_server.errors import DeviceLost, InternalError, InvalidRequest
from edge_server.gpu.memory import BufferPool, pinned_array
from edge_server.gpu.stream import Stream
from edge_server.inference.registry import Snapshot
from edge_server.requests import InferRequest, InferResponse
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.workshop import Workshop

BATCHES = {"x": ((1, 4), (4, 4), (8, 4))}
X = np.arange(4, dtype=np.float32).reshape(1, 4)
# A recorded run does not ask TensorRT.
NO_GRAPHS = 'parameters { key: "cuda_graphs" value { string_value: "false" } }'


def batching(workshop: Workshop, **said: Any) -> None:
    workshop.write(add_one(("n", 4)), **{"profiles": [BATCHES], **said})


def on_device(workshop: Workshop, array: np.ndarray[Any, Any], pool: BufferPool) -> Tensor:
    """`array` in the GPU's memory, written by a stream of somebody else's that is not through."""
    stream = Stream(workshop.devices.gpu(0))
    copy = pool.take(stream, array.shape, array.dtype)
    pinned = pinned_array(workshop.devices.gpu(0), array.shape, array.dtype)
    pinned[...] = array
    stream.to_device(copy, pinned)
    copy.written(stream)
    return Tensor(copy)


@pytest.fixture
def pool(workshop: Workshop) -> BufferPool:
    return BufferPool(workshop.devices.gpu(0), 1 << 20, "test")


def test_a_plan_answers_through_its_scheduler(workshop: Workshop) -> None:
    workshop.write()
    loaded = workshop.loaded("max_batch_size: 1")
    answer = infer(loaded, InferRequest("m", {"x": Tensor(X)}))
    assert isinstance(answer, InferResponse), answer
    np.testing.assert_array_equal(answer.outputs["y"].array, X + 1)


@pytest.mark.parametrize("gpu", ["integrated=1", "integrated=0"])
@pytest.mark.parametrize(
    "how",
    [
        "",
        "optimization { input_pinned_memory { enable: false } "
        "output_pinned_memory { enable: false } }",
        "optimization { cuda { busy_wait_events: true output_copy_stream: true } }",
        "optimization { priority: PRIORITY_MAX }",
        "optimization { priority: PRIORITY_MIN cuda { graphs: true } }",
        'parameters { key: "mapped_memory" value { string_value: "false" } }',
    ],
)
def test_requests_of_one_batch_are_one_run_and_each_gets_its_rows(
    workshop: Workshop, gpu: str, how: str
) -> None:
    workshop.gpu.set(gpu)
    batching(workshop)
    instance = workshop.instance(f"max_batch_size: 8 {how}")
    for turn in range(3):
        parts = [np.full((rows, 4), 10 * turn + rows, np.float32) for rows in (1, 3, 2)]
        asked = [Asked({"x": part}) for part in parts]
        instance.execute([each.request for each in asked])
        for part, each in zip(parts, asked, strict=True):
            np.testing.assert_array_equal(each.array(), part + 1)


def test_answers_are_never_written_again(workshop: Workshop, ask: Callable[..., Asked]) -> None:
    workshop.write()
    instance = workshop.instance()
    first = ask(instance, inputs={"x": X}).array()
    ask(instance, inputs={"x": X + 5})
    np.testing.assert_array_equal(first, X + 1)


@pytest.mark.parametrize(
    ("gpu", "copied"),
    [("integrated=0", [("to_device", 16), ("to_host", 16)]), ("integrated=1", [])],
)
def test_copies_between_host_and_device_are_told_and_mapped_memory_needs_none(
    workshop: Workshop, ask: Callable[..., Asked], gpu: str, copied: list[tuple[str, int]]
) -> None:
    workshop.gpu.set(gpu)
    workshop.write()
    assert ask(workshop.instance(), inputs={"x": X}).copied == copied


@pytest.mark.parametrize("gpu", ["integrated=1", "integrated=0"])
def test_a_tensor_on_the_device_is_read_in_place_and_answered_there(
    workshop: Workshop, pool: BufferPool, ask: Callable[..., Asked], gpu: str
) -> None:
    workshop.gpu.set(gpu)
    workshop.write()
    instance = workshop.instance()
    given = on_device(workshop, X, pool)
    asked = ask(instance, inputs={"x": given}, on_device=True)
    assert asked.copied == []
    assert asked.answer["y"].on_device is not None
    np.testing.assert_array_equal(asked.array(), X + 1)
    assert asked.answer["y"].datatype is DataType.FP32


def test_who_gets_an_answer_on_the_device_waits_for_nothing(
    workshop: Workshop, pool: BufferPool, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    instance = workshop.instance()
    with workshop.gpu.nothing_is_freed():
        asked = ask(instance, inputs={"x": on_device(workshop, X, pool)}, on_device=True)
        array = asked.answer["y"].on_device
        assert not array.ready.reached()
    np.testing.assert_array_equal(array.on_host(), X + 1)


def test_what_a_run_reads_in_place_is_not_written_before_it_is_through(
    workshop: Workshop, pool: BufferPool, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    instance = workshop.instance()
    asked = ask(instance, inputs={"x": on_device(workshop, X, pool)}, on_device=True)
    gc.collect()
    # The pool has one buffer only, which whoever takes it next writes after the run.
    ask(instance, inputs={"x": on_device(workshop, X + 7, pool)}, on_device=True)
    np.testing.assert_array_equal(asked.array(), X + 1)


@pytest.mark.parametrize("gpu", ["integrated=1", "integrated=0"])
@pytest.mark.parametrize("pinned", ["", "optimization { input_pinned_memory { enable: false } }"])
def test_parts_on_the_host_and_on_the_device_come_together(
    workshop: Workshop, pool: BufferPool, gpu: str, pinned: str
) -> None:
    workshop.gpu.set(gpu)
    batching(workshop)
    instance = workshop.instance(f"max_batch_size: 8 {pinned}")
    parts = [np.full((rows, 4), rows, np.float32) for rows in (1, 2, 1, 2, 1)]
    asked = [
        Asked({"x": on_device(workshop, part, pool) if index % 2 else part})
        for index, part in enumerate(parts)
    ]
    instance.execute([each.request for each in asked])
    for part, each in zip(parts, asked, strict=True):
        np.testing.assert_array_equal(each.array(), part + 1)


def test_rows_that_are_not_aligned_as_tensorrt_wants_are_brought_to_where_they_are(
    workshop: Workshop, pool: BufferPool, ask: Callable[..., Asked]
) -> None:
    batching(workshop)
    instance = workshop.instance("max_batch_size: 8")
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = on_device(workshop, whole, pool).array[1:3]
    np.testing.assert_array_equal(ask(instance, inputs={"x": Tensor(array)}).array(), whole[1:] + 1)


def test_a_batch_is_answered_on_the_device_where_all_of_it_want_that(workshop: Workshop) -> None:
    batching(workshop)
    instance = workshop.instance("max_batch_size: 8")
    for others in (True, False):
        asked = [Asked({"x": X}, on_device=True), Asked({"x": X + 3}, on_device=others)]
        instance.execute([each.request for each in asked])
        assert all((each.answer["y"].on_device is not None) is others for each in asked)
        np.testing.assert_array_equal(asked[1].array(), X + 4)


def test_more_answers_than_may_be_kept_on_the_device_go_to_the_host(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    # Imported late, as the simulated TensorRT is found by then only.
    from edge_server.backends.tensorrt.io_buffers import RESPONSES_ON_DEVICE

    shape = (1, 1 << 16)
    workshop.write(add_one(shape))
    instance = workshop.instance()
    x = np.zeros(shape, np.float32)
    kept = [
        ask(instance, inputs={"x": x + i}, on_device=True) for i in range(RESPONSES_ON_DEVICE + 2)
    ]
    there = [each.answer["y"].on_device is not None for each in kept]
    assert there == [True] * RESPONSES_ON_DEVICE + [False] * 2
    for i, each in enumerate(kept):
        assert each.array().flat[0] == i + 1


def test_only_the_outputs_that_are_wanted_are_answered(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    two = onnx_bytes(
        [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])],
        {"x": (TensorProto.FLOAT, (1, 4))},
        {"y": (TensorProto.FLOAT, (1, 4)), "z": (TensorProto.FLOAT, (1, 4))},
    )
    workshop.gpu.set("integrated=0")
    workshop.write(two)
    asked = ask(workshop.instance(), inputs={"x": X}, outputs=("z",))
    assert asked.answer.keys() == {"z"}
    assert asked.copied == [("to_device", 16), ("to_host", 16)]


def test_once_every_size_has_been_seen_nothing_is_allocated(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    batching(workshop)
    instance = workshop.instance("max_batch_size: 8")
    for wish in (False, True):
        ask(instance, inputs={"x": np.repeat(X, 8, 0)}, on_device=wish)
    gc.collect()
    before = workshop.gpu.allocations
    for rows in (1, 8, 3, 8):
        for wish in (False, True):
            ask(instance, inputs={"x": np.repeat(X, rows, 0)}, on_device=wish)
            # What asked and was answered refer to each other.
            gc.collect()
    assert workshop.gpu.allocations == before


@pytest.mark.parametrize("gpu", ["integrated=1", "integrated=0"])
@pytest.mark.parametrize("pinned", ["", "optimization { input_pinned_memory { enable: false } }"])
def test_an_empty_input_is_no_trouble(
    workshop: Workshop, ask: Callable[..., Asked], pool: BufferPool, gpu: str, pinned: str
) -> None:
    workshop.gpu.set(gpu)
    profiles = [{"x": ((0, 4), (1, 4), (2, 4))}]
    workshop.write(add_one(("n", 4)), profiles=profiles)
    config = 'input { name: "x" dims: [-1, 4] } output { name: "y" dims: [-1, 4] } '
    instance = workshop.instance(config + pinned)
    assert ask(instance, inputs={"x": X[:0]}).array().shape == (0, 4)
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)
    given = on_device(workshop, X, pool).array[:0]
    assert ask(instance, inputs={"x": Tensor(given)}).array().shape == (0, 4)


def test_an_empty_output_is_no_trouble(workshop: Workshop, ask: Callable[..., Asked]) -> None:
    shape = onnx_bytes(
        [helper.make_node("Slice", ["x", "from", "to"], ["y"])],
        {"x": (TensorProto.FLOAT, (1, 4))},
        {"y": (TensorProto.FLOAT, (0, 4))},
        **{"from": np.int64([1]), "to": np.int64([1])},
    )
    workshop.write(shape)
    for wish in (False, True):
        assert ask(workshop.instance(), inputs={"x": X}, on_device=wish).array().shape == (0, 4)


def test_a_run_that_tensorrt_refuses_is_that_requests_failure_alone(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    instance = workshop.instance(NO_GRAPHS)
    workshop.tensorrt("fail=enqueue:0")
    error = ask(instance, inputs={"x": X}).answer
    assert isinstance(error, InternalError)
    assert str(error) == (
        "failed to run TRT inference: unable to enqueue for inference m_0: Cask (Cask convolution "
        "execution)"
    )
    np.testing.assert_array_equal(ask(instance, inputs={"x": X}).array(), X + 1)


def test_a_run_that_breaks_the_device_is_told_to_all_and_to_the_daemon(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    instance = workshop.instance(NO_GRAPHS)
    workshop.tensorrt("fail=run:0")
    assert isinstance(ask(instance, inputs={"x": X}).answer, DeviceLost)
    with pytest.raises(DeviceLost, match="the process must be restarted"):
        workshop.devices.check()
    assert isinstance(ask(instance, inputs={"x": X}).answer, DeviceLost)
    workshop.forget()


def test_a_run_that_broke_the_device_unseen_is_found_by_the_next(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write()
    instance = workshop.instance(NO_GRAPHS)
    workshop.tensorrt("fail=run:0")
    assert not isinstance(ask(instance, inputs={"x": X}, on_device=True).answer, Exception)
    assert isinstance(ask(instance, inputs={"x": X}).answer, DeviceLost)
    workshop.forget()


def nonzero(cast: str = "") -> bytes:
    nodes = [helper.make_node("NonZero", ["x"], ["found" if cast else "y"])]
    if cast:
        nodes.append(helper.make_node("Cast", ["found"], ["y"], to=TensorProto.INT32))
    return onnx_bytes(
        nodes,
        {"x": (TensorProto.FLOAT, (1, 4))},
        {"y": (TensorProto.INT32 if cast else TensorProto.INT64, (2, "found"))},
    )


@pytest.mark.parametrize("version", ["8.6.1.6", "10.3.0.30", "10.16.2.1", "11.4.1.1"])
def test_an_output_whose_size_depends_on_the_data(
    workshop: Workshop, ask: Callable[..., Asked], version: str
) -> None:
    workshop.tensorrt(f"version={version}")
    # TensorRT 8 has no INT64, and gives INT32 there.
    workshop.write(nonzero("Cast" if version.startswith("8") else ""), data_dependent=["y"])
    instance = workshop.instance()
    for x in (X, X * 0, X + 1):
        found = ask(instance, inputs={"x": x}).array()
        np.testing.assert_array_equal(found, np.stack(np.nonzero(x)))


def test_no_memory_for_an_output_of_such_a_size_is_told(
    workshop: Workshop, ask: Callable[..., Asked]
) -> None:
    workshop.write(nonzero(), data_dependent=["y"])
    instance = workshop.instance()
    ask(instance, inputs={"x": X * 0})
    workshop.gpu.set("memory=1")
    error = ask(instance, inputs={"x": X}).answer
    assert "out of memory" in str(error)
    workshop.gpu.set("memory=1000000000")
    assert ask(instance, inputs={"x": X}).array().shape == (2, 3)


def reshaped() -> bytes:
    return onnx_bytes(
        [helper.make_node("Reshape", ["x", "sizes"], ["y"])],
        {"x": (TensorProto.FLOAT, (4,)), "sizes": (TensorProto.INT64, (2,))},
        {"y": (TensorProto.FLOAT, ("a", "b"))},
    )


def test_an_input_that_holds_a_shape_is_read_on_the_host(
    workshop: Workshop, ask: Callable[..., Asked], pool: BufferPool
) -> None:
    profiles = [{"sizes": ((1, 1), (2, 2), (4, 4))}]
    workshop.write(reshaped(), holding_shapes=["sizes"], profiles=profiles)
    completed = workshop.complete()
    assert [t.is_shape_tensor for t in completed.message.input] == [False, True]
    instance = workshop.instance()
    x = np.arange(4, dtype=np.float32)
    for sizes in ((2, 2), (1, 4), (4, 1)):
        given = np.array(sizes, np.int64)
        made = ask(instance, inputs={"x": x, "sizes": given}).array()
        np.testing.assert_array_equal(made, x.reshape(sizes))
    lent = on_device(workshop, np.int64([2, 2]), pool)
    assert ask(instance, inputs={"x": x, "sizes": lent}).array().shape == (2, 2)
    error = ask(instance, inputs={"x": x, "sizes": np.int64([5, 1])}).answer
    assert isinstance(error, InvalidRequest)
    assert "to be between 1 and 4 but received 5" in str(error)


@pytest.mark.parametrize("wish", [True, False])
def test_an_output_that_holds_a_shape_is_written_on_the_host(
    workshop: Workshop, ask: Callable[..., Asked], wish: bool
) -> None:
    shape = onnx_bytes(
        [helper.make_node("Shape", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])],
        {"x": (TensorProto.FLOAT, ("n", 4))},
        {"y": (TensorProto.INT64, (2,)), "z": (TensorProto.FLOAT, ("n", 4))},
    )
    workshop.write(shape, holding_shapes=["y"], profiles=[BATCHES])
    completed = workshop.complete()
    assert completed.max_batch_size == 0
    assert [t.is_shape_tensor for t in completed.message.output] == [True, False]
    instance = workshop.instance()
    for rows in (1, 8):
        x = np.repeat(X, rows, 0)
        asked = ask(instance, inputs={"x": x}, outputs=("y", "z"), on_device=wish)
        assert asked.array("y").tolist() == [rows, 4]
        np.testing.assert_array_equal(asked.array("z"), -x)
        assert (asked.answer["z"].on_device is not None) is wish


@pytest.mark.parametrize("cuda", ["", "optimization { cuda { graphs: true } }"])
@pytest.mark.parametrize("gpu", ["integrated=1", "integrated=0"])
def test_requests_of_many_threads_never_see_each_others_data(
    workshop: Workshop, gpu: str, cuda: str
) -> None:
    """An execution context that two threads are in raises, in the simulation."""
    workshop.gpu.set(gpu)
    batching(workshop)
    loaded = workshop.loaded(
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 500 } "
        f"instance_group {{ count: 2 kind: KIND_GPU }} {cuda}"
    )
    wrong: list[Any] = []

    def client(number: int) -> None:
        for turn in range(12):
            x = np.full((1 + turn % 3, 4), 1000 * number + turn, np.float32)
            request = InferRequest("m", {"x": Tensor(x)}, on_device=turn % 4 == 0)
            answers: list[Any] = []
            over = threading.Event()

            def respond(
                answer: Any, final: bool, answers: list[Any] = answers, over: Any = over
            ) -> None:
                answers.append(answer)
                over.set()

            loaded.scheduler.submit(request, Snapshot({}), respond)
            assert over.wait(30)
            answer = answers[0]
            if not isinstance(answer, InferResponse):
                wrong.append(answer)
                continue
            tensor = answer.outputs["y"]
            made = tensor.array if tensor.on_device is None else tensor.on_device.on_host()
            if not np.array_equal(made, x + 1):
                wrong.append((made, x))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# Up to 10.12 the bindings end the process where they should raise.
@pytest.mark.parametrize("version", ["8.6.1.6", "10.3.0.30", "10.16.2.1", "11.4.1.1"])
def test_inputs_that_do_not_go_together_are_the_requests_fault(
    workshop: Workshop, version: str
) -> None:
    workshop.tensorrt(f"version={version}")
    workshop.write(two_inputs(), profiles=[dict.fromkeys("ab", ((2, 2), (2, 4), (2, 8)))])
    instance = workshop.instance()
    asked = Asked({"a": np.ones((2, 3), np.float32), "b": np.ones((2, 4), np.float32)})
    instance.execute([asked.request])
    assert isinstance(asked.answer, InvalidRequest)
    assert "they do not go together: IExecutionContext::" in str(asked.answer)
    again = Asked({name: np.ones((2, 4), np.float32) for name in "ab"})
    instance.execute([again.request])
    np.testing.assert_array_equal(again.array("y"), 2)


def test_an_input_without_a_shape_is_named(workshop: Workshop) -> None:
    for version in ("8.6.1.6", "10.16.2.1"):
        workshop.tensorrt(f"version={version}")
        batching(workshop)
        context: Any = workshop.instance("max_batch_size: 8")._context
        context._shapes_inferred = False
        context._shapes.clear()
        context._context._shapes.clear()
        with pytest.raises(InternalError, match="TensorRT does not know the shapes for x: "):
            context.set_shapes(0, {})
        workshop.unload()


@pytest.mark.parametrize("version", ["8.6.1.6", "10.3.0.30", "10.16.2.1"])
def test_a_profile_is_not_asked_for_where_tensorrt_would_refuse_it(
    workshop: Workshop, version: str
) -> None:
    workshop.tensorrt(f"version={version}")
    batching(workshop, profiles=[BATCHES, BATCHES])
    context: Any = workshop.instance("max_batch_size: 8")._context
    with pytest.raises(InternalError, match=r"profile 2\[2\] for m_0\. Expected .* range 0-1$"):
        context.set_shapes(2, {"x": (1, 4)})
    workshop.gpu.set("fail=cuDeviceGetCount:719:0")
    with pytest.raises(DeviceLost), workshop.devices.gpu(0).current():
        workshop.devices.gpu(0).driver.Device.count()
    with pytest.raises(DeviceLost, match="synchronize"):
        context.set_shapes(1, {"x": (1, 4)})
    workshop.forget()


def test_a_profile_that_tensorrt_refuses_all_the_same_is_told(workshop: Workshop) -> None:
    workshop.tensorrt("version=10.16.2.1")
    batching(workshop, profiles=[BATCHES, BATCHES])
    context: Any = workshop.instance("max_batch_size: 8")._context
    workshop.tensorrt("fail=profile:0")
    with workshop.devices.gpu(0).current():
        with pytest.raises(InternalError, match=r"range 0-1: Cuda Runtime \(an error of the "):
            context.set_shapes(1, {"x": (1, 4)})
        context.set_shapes(1, {"x": (1, 4)})
