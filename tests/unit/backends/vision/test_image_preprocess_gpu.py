"""`image_preprocess` on a GPU, simulated: a stream stands still there until somebody waits for it,
so what is read or overwritten too early shows."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from unit.backends.vision.preprocessing import (
    GPU,
    IMAGE,
    NETWORK,
    PLACES,
    SIZE,
    Preprocess,
    by_opencv,
    config,
    copies,
    entry,
    frames,
    parameter,
)
from unit.inference.ensembles import models_of

from edge_server.backends.contract import (
    ExecuteRequest,
    LoadContext,
    TensorModel,
)
from edge_server.backends.vision import image_preprocess
from edge_server.errors import (
    DeviceLost,
    EdgeServerError,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from edge_server.gpu.memory import BufferPool, CudaArray
from edge_server.gpu.stream import Stream
from edge_server.inference.registry import ModelEntry, ModelState, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.model_config.config import ModelConfig, Placement
from edge_server.pipeline.lane_model import FrameInputs, ImageInput
from edge_server.pixels import Image
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from support.simulated_gpu import SimulatedGpu

    from edge_server.backends.contract import Model, Tensors
    from edge_server.gpu.device import Device, Devices

ON_GPU = IMAGE + NETWORK + SIZE + GPU
# An Orin reads pinned host memory in place; a card in a PC is given a copy.
KINDS = pytest.mark.parametrize("words", ["integrated=1", "integrated=0"], ids=["Orin", "card"])


class Camera:
    """Another user of the GPU, with a stream of its own and frames there."""

    def __init__(self, device: Device) -> None:
        self.stream: Stream = Stream(device)
        self._pool = BufferPool(device, 1 << 24, "camera")

    def frame(self, image: NDArray[np.uint8]) -> CudaArray:
        """On its way to the device: nothing has arrived yet."""
        array = self._pool.take(self.stream, image.shape, np.uint8)
        self.stream.to_device(array, image)
        array.written(self.stream)
        return array


def execute(
    model: image_preprocess.ImagePreprocess, images: Sequence[NDArray[np.uint8] | CudaArray]
) -> list[Tensors | EdgeServerError]:
    """One batch of requests, all of which want all outputs; arrays stay where they are."""
    answers: list[Tensors | EdgeServerError] = []

    def respond(answer: Tensors | EdgeServerError | None, final: bool, parameters: object) -> None:
        assert answer is not None
        answers.append(answer)

    instance = model.make_instance("p_0", Placement("GPU", 0))
    wanted = frozenset({"input", "size"})
    instance.execute(
        [
            ExecuteRequest(
                {"image": Tensor(image)},
                wanted,
                lambda answer, final, parameters=None: respond(answer, final, parameters),
                InferRequest("p", {}),
                Snapshot({}),
            )
            for image in images
        ]
    )
    return answers


@KINDS
def test_requests_of_a_batch_get_their_own_rows(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str
) -> None:
    simulated_gpu.set(words)
    model = image_preprocess.load(LoadContext(None, config(ON_GPU, batch=32), devices))
    # More frames than one launch takes; some are on the host, some on the device.
    images = [frames(count, 40, 70, seed) for seed, count in enumerate((3, 1, 14, 2))]
    camera = Camera(devices.gpu())
    given = [images[0], camera.frame(images[1]), images[2], camera.frame(images[3])]
    answers = execute(model, given)
    for image, answer in zip(images, answers, strict=True):
        assert not isinstance(answer, EdgeServerError)
        planes: Any = answer["input"].array
        np.testing.assert_array_equal(planes.on_host(), by_opencv(image))
        assert answer["size"].array.tolist() == [[40, 70]] * len(image)


@KINDS
def test_it_responses_before_the_gpu_has_begun_and_the_frame_may_go(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str
) -> None:
    simulated_gpu.set(words)
    model = Preprocess(config(ON_GPU), devices)
    images = [frames(1, 40, 70, seed) for seed in range(8)]
    planes = []
    for image in images:
        used = image.copy()
        planes.append(model.stay(used))
        used[:] = 0
    assert not planes[-1].ready.reached()
    for image, array in zip(images, planes, strict=True):
        np.testing.assert_array_equal(array.on_host(), by_opencv(image))


@KINDS
def test_once_warm_it_allocates_nothing(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str
) -> None:
    simulated_gpu.set(words)
    model = Preprocess(config(ON_GPU), devices)
    for seed in range(4):
        model.run(frames(1, 40, 70, seed))
    warm = simulated_gpu.allocations
    for seed in range(8):
        # A smaller frame fits where a larger one did.
        model.run(frames(1, 40 - seed, 70, seed))
    assert simulated_gpu.allocations == warm


@pytest.mark.parametrize(("words", "most"), [("integrated=1", 6), ("integrated=0", 7)])
def test_a_warm_frame_costs_few_calls_of_the_driver(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str, most: int
) -> None:
    simulated_gpu.set(words)
    model = Preprocess(config(ON_GPU), devices)
    for seed in range(4):
        model.stay(frames(1, 40, 70, seed))
    warm = simulated_gpu.calls
    model.stay(frames(1, 40, 70))
    # Two for the context, three for events, one each for the kernel and a card's copy.
    assert simulated_gpu.calls - warm <= most


@KINDS
def test_a_larger_frame_takes_the_place_of_smaller_ones(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str
) -> None:
    simulated_gpu.set(words)
    model = Preprocess(config(ON_GPU), devices)
    for size in (10, 40, 20, 80, 30):
        image = frames(1, size, 2 * size, size)
        np.testing.assert_array_equal(model.run(image)["input"], by_opencv(image))


def test_a_frame_in_mapped_memory_is_no_copy_to_the_device(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    model.stay(frames(1, 40, 70))
    assert model.copies() == {}
    model.run(frames(1, 40, 70), "input")
    assert model.copies() == {"to_host": (1, 3 * 36 * 64 * 4)}


def test_a_frame_for_a_card_is_copied_once(devices: Devices, simulated_gpu: SimulatedGpu) -> None:
    simulated_gpu.set("integrated=0")
    model = Preprocess(config(ON_GPU), devices)
    for _ in range(3):
        model.stay(frames(1, 40, 70))
    assert model.copies() == {"to_device": (3, 3 * 40 * 70 * 3)}


@KINDS
@pytest.mark.parametrize("networks", [2, 4])
def test_a_frame_for_several_networks_is_copied_to_the_device_once(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str, networks: int
) -> None:
    simulated_gpu.set(words)
    models = [Preprocess(config(ON_GPU), devices) for _ in range(networks)]
    for seed in range(3):
        image = frames(1, 40, 70, seed)
        inputs, taker = FrameInputs(), ImageInput("image", None, True, on_gpu=True)
        shared = [inputs.of(taker, Image.of_bgr(image[0]))[0].array for _ in models]
        planes = [model.stay(array) for model, array in zip(models, shared, strict=True)]
        for array in planes:
            np.testing.assert_array_equal(array.on_host(), by_opencv(image))
    assert models[0].copies() == {"to_device": (3, 3 * 40 * 70 * 3)}
    assert [model.copies() for model in models[1:]] == [{}] * (networks - 1)


@PLACES
def test_a_request_may_ask_for_a_region_of_its_frame(devices: Devices, group: str) -> None:
    model = Preprocess(config(IMAGE + NETWORK + SIZE + group), devices)
    image = frames(1, 40, 70)
    made = model.run(image, crop="10,4,33,19")
    np.testing.assert_array_equal(made["input"], by_opencv(image[:, 4:23, 10:43]))
    assert made["size"].tolist() == [[19, 33]]
    for crop, why in (("0,0,71,40", "the frame has 70x40 px"), ("1,2,3", "x,y,width,height in px")):
        with pytest.raises(InvalidRequest, match=why):
            model.run(image, crop=crop)
    cropped = config(IMAGE + NETWORK + group + parameter("crop", "0,0,8,8"))
    with pytest.raises(InvalidRequest, match="has a crop or a lens of its own"):
        Preprocess(cropped, devices).run(image, crop="0,0,8,8")


def test_a_frame_on_the_device_is_read_where_it_lies_before_its_memory_is_used_again(
    devices: Devices,
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    camera = Camera(devices.gpu())
    images = [frames(1, 40, 70, seed) for seed in range(4)]
    planes = []
    for image in images:
        frame = camera.frame(image)
        planes.append(model.stay(frame))
        # The next frame takes its memory; the camera is ahead with its work.
        del frame
        for _ in range(4):
            camera.stream.record().reached()
    for image, array in zip(images, planes, strict=True):
        np.testing.assert_array_equal(array.on_host(), by_opencv(image))
    assert model.copies() == {}


def test_a_frame_on_another_gpu_goes_by_the_host(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    simulated_gpu.set("devices=2,integrated=0")
    model = Preprocess(config(ON_GPU), devices)
    image = frames(1, 40, 70)
    array = model.stay(Camera(devices.gpu(1)).frame(image))
    np.testing.assert_array_equal(array.on_host(), by_opencv(image))
    assert model.copies() == {"to_host": (1, image.nbytes), "to_device": (1, image.nbytes)}


def test_kernels_are_loaded_once_for_all_instances_on_a_gpu(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    simulated_gpu.set("devices=2,fail=cuModuleLoadDataEx:209:2")
    group = 'instance_group { name: "p" kind: KIND_GPU gpus: [0, 1] count: 3 }'
    model = Preprocess(config(IMAGE + NETWORK + group), devices)
    image = frames(1, 40, 70)
    np.testing.assert_array_equal(model.run(image)["input"], by_opencv(image))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "compute=70",
            "instance p_0 cannot be made: the preprocessing kernels are compiled for compute "
            "capability 7.5 and newer, this GPU has 7.0; preprocess on the CPU (instance_group ",
        ),
        (
            "compute=120,driver=12060",
            "instance p_0 cannot be made: the preprocessing kernels need a driver for CUDA 13.0 or "
            "newer, this one is for 12.6; update the driver, or preprocess on the CPU "
            "(instance_group KIND_CPU)",
        ),
        (
            "fail=cuModuleLoadDataEx:209:0",
            "they were not compiled for this GPU and driver; compile them with its own toolkit "
            "(scripts/build_kernels)",
        ),
        ("fail=cuModuleGetFunction:500:0", "find kernel bgr_to_nchw: "),
        ("memory=27000", "allocate 27648 bytes: cuMemAlloc failed: out of memory: fewer models"),
    ],
)
def test_an_instance_that_cannot_be_on_its_gpu_is_not_made_elsewhere(
    devices: Devices, simulated_gpu: SimulatedGpu, words: str, text: str
) -> None:
    simulated_gpu.set(words)
    with pytest.raises(Unavailable) as caught:
        Preprocess(config(ON_GPU), devices)
    assert text in str(caught.value)
    assert str(caught.value).startswith("instance p_0 cannot be made: ")


def test_a_gpu_that_is_lost_while_an_instance_is_made_is_reported_as_that(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    simulated_gpu.set("fail=cuModuleLoadDataEx:719:0")
    with pytest.raises(DeviceLost):
        Preprocess(config(ON_GPU), devices)


def test_a_launch_that_fails_costs_its_own_requests(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    image = frames(1, 40, 70)
    simulated_gpu.set("fail=cuLaunchKernel:701:0")
    with pytest.raises(InternalError, match=r"run kernel bgr_to_nchw: .* too many resources"):
        model.run(image)
    np.testing.assert_array_equal(model.run(image)["input"], by_opencv(image))


def test_memory_that_is_short_for_one_frame_costs_that_frame(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    image = frames(1, 40, 70)
    simulated_gpu.set("fail=cuMemHostAlloc:2:0:2")
    with pytest.raises(Unavailable, match=r"pin 8400 bytes of host memory: .* out of memory"):
        model.run(image)
    np.testing.assert_array_equal(model.run(image)["input"], by_opencv(image))


def test_arrays_that_no_caller_lets_go_of_end_in_an_error_that_names_the_instance(
    devices: Devices,
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    held = [model.stay(frames(1, 8, 8)) for _ in range(32)]
    with pytest.raises(Unavailable, match="GPU 0: p_0: 27648 bytes are wanted"):
        model.stay(frames(1, 8, 8))
    held.pop()
    model.stay(frames(1, 8, 8))


def test_a_kernel_that_breaks_the_gpu_is_known_to_all(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    simulated_gpu.set("fail=kernel:700:0")
    with pytest.raises(DeviceLost):
        model.run(frames(1, 40, 70))
    with pytest.raises(DeviceLost):
        devices.check()
    model.close()


def test_what_it_made_outlives_it_and_nothing_else_does(
    devices: Devices, simulated_gpu: SimulatedGpu
) -> None:
    model = Preprocess(config(ON_GPU), devices)
    image = frames(1, 40, 70)
    array = model.stay(image)
    model.close()
    np.testing.assert_array_equal(array.on_host(), by_opencv(image))
    del array, model
    gc.collect()
    assert simulated_gpu.comes_to(0)


class Network:
    """A network on the GPU, as far as its neighbours see it: it reads an array there on a stream of
    its own and leaves another; here, the same values. It never sees one on the host."""

    def __init__(self, device: Device) -> None:
        self._stream = Stream(device)
        self._pool = BufferPool(device, 1 << 24, "network")

    def make_instance(self, name: str, placement: Placement) -> Network:
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            given = request.inputs["planes"].array
            assert isinstance(given, CudaArray)
            self._stream.wait(given.ready)
            made = self._pool.take(self._stream, given.shape, given.dtype)
            self._stream.copy(made, given)
            made.written(self._stream)
            given.read_by(made.ready)
            request.respond({"features": Tensor(made)}, True)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


def test_between_preprocessing_and_a_network_on_the_gpu_nothing_is_copied(
    devices: Devices,
) -> None:
    planes = "data_type: TYPE_FP32 dims: [3, 36, 64]"
    network = model_config(
        f'name: "network" input {{ name: "planes" {planes} }} '
        f'output {{ name: "features" {planes} }}' + GPU
    )
    decode = model_config(
        f'name: "decode" input {{ name: "features" {planes} }} '
        'output { name: "mean" data_type: TYPE_FP32 dims: [3] }'
    )
    ensemble = model_config(
        f'name: "lanes" {IMAGE} output {{ name: "mean" data_type: TYPE_FP32 dims: [3] }} '
        'platform: "ensemble" ensemble_scheduling { '
        'step { model_name: "p" model_version: -1 input_map { key: "image" value: "image" } '
        'output_map { key: "input" value: "planes" } } '
        'step { model_name: "network" model_version: -1 '
        'input_map { key: "planes" value: "planes" } '
        'output_map { key: "features" value: "features" } } '
        'step { model_name: "decode" model_version: -1 '
        'input_map { key: "features" value: "features" } '
        'output_map { key: "mean" value: "mean" } } }'
    )

    def mean(inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        return {"mean": Tensor(inputs["features"].array.mean(axis=(1, 2)))}

    def ready(of: ModelConfig, model: Model) -> ModelEntry:
        loaded = Scheduling().model(of, 1, model)
        return ModelEntry(of.name, 1, ModelState.READY, loaded=loaded)

    members = {
        "p": entry(config(IMAGE + NETWORK + GPU, batch=0), devices),
        "network": ready(network, Network(devices.gpu())),
        "decode": ready(decode, TensorModel(mean)),
    }
    snapshot = models_of(ensemble, *members.values()).snapshot
    for seed in range(5):
        image = frames(1, 40, 70, seed)[0]
        answer = snapshot.infer(InferRequest("lanes", {"image": Tensor(image)}))
        expected = by_opencv([image])[0].mean(axis=(1, 2))
        np.testing.assert_allclose(answer.outputs["mean"].array, expected, rtol=1e-6)
    assert copies(members["p"]) == copies(members["decode"]) == {}
    assert copies(members["network"]) == {"to_host": (5, 5 * 3 * 36 * 64 * 4)}


def model_config(text: str) -> ModelConfig:
    """One that does not batch."""
    head = "" if "ensemble" in text else 'backend: "identity" instance_group { count: 1 } '
    return ModelConfig.of(text_format.Parse(head + text, pb.ModelConfig()))
