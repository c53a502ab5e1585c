"""Warm-up: the sample requests of a configuration, run on every instance before it serves."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import ExecuteRequest, Interruptible
from edge_server.errors import EdgeServerError, InternalError, ModelConfigError, ModelLoadError
from edge_server.inference.snapshot import Snapshot
from edge_server.inference.tensor_data import first_tensor, random_data, zeros
from edge_server.model_config.files import WARMUP_DIRECTORY, reading
from edge_server.process.threads import GivenUp, Hangs, run_with_timeout
from edge_server.requests import NO_PARAMETERS, InferRequest
from edge_server.tensors import Tensor, shape_fits, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.contract import Instance, Model, ModelMetric, Tensors
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.scheduling import Warmup, WarmupInput
    from edge_server.requests import Parameters

# A decoupled model may respond after `execute` has returned, within this time.
RESPONSE_TIMEOUT_S = 60.0
# The longest run of a model before it serves; longer than the wait for a late response.
RUN_TIMEOUT_S = 90.0
# An execution accelerator may build its engines in a model's first run.
_BUILDING_TIMEOUT_S = 600.0


def warmed_up(config: ModelConfig, model: Model, directory: Path) -> Model:
    """Wrap `model` so that each new instance runs the configuration's samples first.

    Raises:
        ModelConfigError: see `read_samples`.
    """
    samples = read_samples(config, directory / WARMUP_DIRECTORY)
    return _WarmingModel(config, model, samples) if samples else model


def read_samples(config: ModelConfig, folder: Path) -> list[tuple[Warmup, Mapping[str, Tensor]]]:
    """Read the samples of the configuration, with the data of their files in `folder`.

    The inputs have the shapes that the model takes, batch dimension included. Random data is the
    same each time.

    Raises:
        ModelConfigError: a sample does not fit the model, or its file cannot be used; names model,
            sample and remedy.
    """
    samples: list[tuple[Warmup, Mapping[str, Tensor]]] = []
    for warmup in config.warmups:
        try:
            samples.append((warmup, _inputs(config, warmup, folder)))
        except ModelConfigError as error:
            raise ModelConfigError(
                f"model '{config.name}': warm-up sample '{warmup.name}': {error}"
            ) from error
    return samples


class _WarmingModel:
    """A `Model` whose instances have run the samples; no statistics count these runs.

    Instances are made before they serve, so their samples run in an empty snapshot; a Python model
    finds the models that serve already. A run that hangs is ended where the backend can do that.
    """

    def __init__(
        self, config: ModelConfig, model: Model, samples: list[tuple[Warmup, Mapping[str, Tensor]]]
    ) -> None:
        self._config = config
        self._model = model
        self._samples = samples

    def make_instance(self, name: str, placement: Placement) -> Instance:
        """Raises: ModelConfigError: a sample failed; names model, sample and remedy."""
        instance = self._model.make_instance(name, placement)
        try:
            if isinstance(self._model, Interruptible):
                self._run_bounded(self._model, instance)
            else:
                self._run_samples(instance, lambda: None)
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

    def _run_bounded(self, model: Interruptible, instance: Instance) -> None:
        """Raises: ModelLoadError: a run hung, and was ended; GivenUp: see `require_wanted`."""
        name = self._config.name
        builds = self._config.message.optimization.HasField("execution_accelerators")
        try:
            run_with_timeout(
                f"warm-up-{name}",
                lambda note_progress: self._run_samples(instance, note_progress),
                _BUILDING_TIMEOUT_S if builds else RUN_TIMEOUT_S,
                late=lambda: None,
            )
        except Hangs as error:
            model.interrupt(time.monotonic())
            raise ModelLoadError(
                f"model '{name}': its warm-up: {error}; correct the model, or give its "
                "model_warmup data that it responds to"
            ) from error
        except GivenUp:
            model.interrupt(time.monotonic())
            raise

    def _run_samples(self, instance: Instance, note_progress: Callable[[], None]) -> None:
        for warmup, inputs in self._samples:
            self._run(instance, warmup, inputs, note_progress)

    def _run(
        self,
        instance: Instance,
        warmup: Warmup,
        inputs: Mapping[str, Tensor],
        note_progress: Callable[[], None],
    ) -> None:
        try:
            for _ in range(warmup.count):
                note_progress()
                _run(self._config, instance, inputs)
        except Exception as error:
            why = str(error) if isinstance(error, EdgeServerError) else repr(error)
            raise ModelConfigError(
                f"model '{self._config.name}': warm-up sample '{warmup.name}' failed: {why}; give "
                "it data that the model can work on, or remove that model_warmup"
            ) from error


def _run(config: ModelConfig, instance: Instance, inputs: Mapping[str, Tensor]) -> None:
    over = threading.Event()
    errors: list[EdgeServerError] = []

    def respond(
        answer: Tensors | EdgeServerError | None,
        final: bool,
        parameters: Parameters = NO_PARAMETERS,  # noqa: ARG001 - not needed
    ) -> None:
        if isinstance(answer, EdgeServerError):
            errors.append(answer)
        if final:
            over.set()

    request, others = InferRequest(config.name, inputs), Snapshot({})
    instance.execute([ExecuteRequest(inputs, config.output_names, respond, request, others)])
    if not over.wait(RESPONSE_TIMEOUT_S if config.decoupled else 0.0):
        raise InternalError("it ended without a response")
    if errors:
        raise errors[0]


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
        array, shape = _array(data, folder), config.reshapes.get(name, data.shape)
        if config.max_batch_size > 0:
            array, shape = np.repeat(array[np.newaxis], batch_size, axis=0), (batch_size, *shape)
        try:
            inputs[name] = Tensor.of(array.reshape(shape))
        except ValueError as error:
            raise ModelConfigError(
                f"input '{name}' of shape {shape_text(array.shape)} cannot be reshaped to "
                f"{shape_text(shape)}"
            ) from error
    return inputs


def _array(data: WarmupInput, folder: Path) -> NDArray[Any]:
    if data.file is None:
        return (random_data if data.random else zeros)(data.datatype, data.shape)
    with reading(folder / data.file):
        raw = (folder / data.file).read_bytes()
    array, expected = first_tensor(raw, data.datatype, data.shape)
    if array is None:
        # The missing blank is in Triton's text.
        raise ModelConfigError(
            f"warmup setting expects {expected} bytes, but the data provided from {data.file}only "
            f"has {len(raw)} bytes"
        )
    return array
