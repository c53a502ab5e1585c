"""Warm-up: the sample requests of a configuration, run on every instance before it serves."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import ExecuteRequest
from edge_server.errors import EdgeServerError, InternalError, ModelConfigError
from edge_server.inference.snapshot import Snapshot
from edge_server.model_config.files import reading
from edge_server.model_config.warmup import WarmupData
from edge_server.requests import NO_PARAMETERS, InferRequest
from edge_server.tensors import DataType, Tensor, element_count, shape_fits, shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.contract import Instance, Model, ModelMetric, Tensors
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.warmup import Warmup, WarmupInput
    from edge_server.requests import Parameters

# A decoupled model may respond after `execute` has returned, within this time.
PATIENCE_S = 60.0


@dataclass(frozen=True, eq=False)
class WarmUpSample:
    """One request that an instance runs `count` times.

    Attributes:
        inputs: in the shapes that the model takes, batch dimension included; with the control and
            state tensors of a sequence model.
    """

    name: str
    count: int
    inputs: Mapping[str, Tensor]


def warmed_up(config: ModelConfig, model: Model, directory: Path) -> Model:
    """Wrap `model` so that each new instance runs the configuration's samples first.

    Raises:
        ModelConfigError: see `read_samples`.
    """
    samples = read_samples(config, directory / "warmup")
    return _WarmingModel(config, model, samples) if samples else model


def read_samples(config: ModelConfig, folder: Path) -> list[WarmUpSample]:
    """Read the samples of the configuration, with the data of their files in `folder`.

    Random data is the same each time.

    Raises:
        ModelConfigError: a sample does not fit the model, or its file cannot be used; names model,
            sample and remedy.
    """
    samples = []
    for warmup in config.warmups:
        try:
            inputs = _inputs(config, warmup, folder)
        except ModelConfigError as error:
            raise ModelConfigError(
                f"model '{config.name}': warm-up sample '{warmup.name}': {error}"
            ) from error
        samples.append(WarmUpSample(warmup.name, warmup.count, inputs))
    return samples


class _WarmingModel:
    """A `Model` whose instances have run the samples; no statistics count these runs.

    Instances are made before they serve, so their samples run in an empty snapshot; a Python model
    finds the models that serve already.
    """

    def __init__(self, config: ModelConfig, model: Model, samples: Sequence[WarmUpSample]) -> None:
        self._config = config
        self._model = model
        self._samples = samples

    def make_instance(self, name: str, placement: Placement) -> Instance:
        """Raises: ModelConfigError: a sample failed; names model, sample and remedy."""
        instance = self._model.make_instance(name, placement)
        try:
            for sample in self._samples:
                for _ in range(sample.count):
                    self._run(instance, sample)
        except BaseException:
            instance.close()
            raise
        return instance

    def not_ready_reason(self) -> str:
        return self._model.not_ready_reason()

    def metrics(self) -> Sequence[ModelMetric]:
        return self._model.metrics()

    def close(self) -> None:
        self._model.close()

    def _run(self, instance: Instance, sample: WarmUpSample) -> None:
        try:
            _run(self._config, instance, sample)
        except Exception as error:
            why = str(error) if isinstance(error, EdgeServerError) else repr(error)
            raise ModelConfigError(
                f"model '{self._config.name}': warm-up sample '{sample.name}' failed: {why}; give "
                "it data that the model can work on, or remove that model_warmup"
            ) from error


class _Answered:
    """A `RespondTensors` that records the outcome."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: EdgeServerError | None = None

    def __call__(
        self,
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,  # noqa: ARG002 - not needed
    ) -> None:
        if isinstance(answer, EdgeServerError):
            self.error = answer
        if final:
            self.over.set()


def _run(config: ModelConfig, instance: Instance, sample: WarmUpSample) -> None:
    answered = _Answered()
    outputs = config.output_names
    request = InferRequest(config.name, sample.inputs, id=sample.name)
    instance.execute([ExecuteRequest(sample.inputs, outputs, answered, request, Snapshot({}))])
    if not answered.over.wait(PATIENCE_S if config.decoupled else 0.0):
        raise InternalError("it ended without a response")
    if answered.error is not None:
        raise answered.error


def _inputs(config: ModelConfig, warmup: Warmup, folder: Path) -> dict[str, Tensor]:
    batch_size = max(1, warmup.batch_size)
    if batch_size > max(1, config.max_batch_size):
        raise ModelConfigError(
            f"batch_size {batch_size} is more than max_batch_size {config.max_batch_size} allows"
        )
    missing = [s.name for s in config.inputs if not s.optional and s.name not in warmup.inputs]
    if missing:
        raise ModelConfigError(f"gives no data for input '{missing[0]}'; every input needs some")
    specs = {spec.name: spec for spec in config.inputs}
    inputs = {}
    for name, data in sorted(warmup.inputs.items()):
        spec = specs.get(name)
        if spec is not None and (
            data.datatype is not spec.datatype or not shape_fits(data.shape, spec.shape)
        ):
            raise ModelConfigError(
                f"input '{name}' is {data.datatype.config_name} {shape_text(data.shape)}, the "
                f"model takes {spec.datatype.config_name} {shape_text(spec.shape)}"
            )
        array = _array(data, folder)
        if config.max_batch_size > 0:
            array = np.repeat(array[np.newaxis], batch_size, axis=0)
        inputs[name] = Tensor.of(_for_model(config, name, array))
    return inputs


def _for_model(config: ModelConfig, name: str, array: NDArray[Any]) -> NDArray[Any]:
    shape = config.reshapes.get(name)
    if shape is None:
        return array
    try:
        return array.reshape((len(array), *shape) if config.max_batch_size > 0 else shape)
    except ValueError as error:
        raise ModelConfigError(
            f"input '{name}' of shape {shape_text(array.shape)} cannot be reshaped to "
            f"{shape_text(shape)}"
        ) from error


def _array(data: WarmupInput, folder: Path) -> NDArray[Any]:
    if data.file is not None:
        return _from_file(data.file, data.datatype, data.shape, folder)
    if data.data is WarmupData.RANDOM:
        return random_data(data.datatype, data.shape)
    return zeros(data.datatype, data.shape)


def zeros(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros of any type; texts are empty."""
    if datatype is DataType.BYTES:
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, datatype.numpy)


def random_data(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Any integer, floats in [0, 1), texts of 8 digits; the same each time."""
    generator = np.random.default_rng(0)
    dtype = datatype.numpy
    if datatype is DataType.BYTES:
        texts = [b"%08d" % n for n in generator.integers(0, 10**8, element_count(shape))]
        return np.array(texts, np.object_).reshape(shape)
    if datatype is DataType.BF16:
        # The upper half of a float32 is a bfloat16.
        bits = generator.random(shape, np.float32).view(np.uint32) >> 16
        return bits.astype("<u2").view(dtype)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def _from_file(file: str, datatype: DataType, shape: tuple[int, ...], folder: Path) -> NDArray[Any]:
    raw = _file_in(folder, file)
    count = element_count(shape)
    if datatype is DataType.BYTES:
        return np.array(_texts(raw, count, file), np.object_).reshape(shape)
    expected = count * datatype.numpy.itemsize
    if len(raw) < expected:
        raise _too_short(expected, file, len(raw))
    return np.frombuffer(raw, datatype.numpy, count).reshape(shape)


def _file_in(folder: Path, file: str) -> bytes:
    path = folder / file
    with reading(path):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelConfigError(
                f"input_data_file '{file}' leaves {folder}; put the file there and give its name"
            )
        return path.read_bytes()


def _texts(raw: bytes, count: int, file: str) -> list[bytes]:
    """The first `count` elements of BYTES in the protocol's form: 4 bytes of length, then text."""
    texts: list[bytes] = []
    at = 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if len(raw) < max(end, at + 4):
            raise _too_short(max(end, at + 4), file, len(raw))
        texts.append(raw[at + 4 : end])
        at = end
    return texts


def _too_short(expected: int, file: str, got: int) -> ModelConfigError:
    # The missing blank is in Triton's text.
    return ModelConfigError(
        f"warmup setting expects {expected} bytes, but the data provided from {file}only has "
        f"{got} bytes"
    )
