"""Makes loaded models: instances, warmed up, statistics and the scheduler of a configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from edge_server.backends.contract import ExecuteRequest, Interruptible, Model
from edge_server.errors import EdgeServerError, InternalError, ModelConfigError, ModelLoadError
from edge_server.inference.direct import DirectScheduler, InstancePool
from edge_server.inference.dynamic_batch import DynamicBatchScheduler
from edge_server.inference.ensemble import EnsembleScheduler
from edge_server.inference.execution import Executor
from edge_server.inference.line import LineWatch, StepThreads
from edge_server.inference.registry import LoadedModel, RefCount, SchedulerWrapper, Snapshot
from edge_server.inference.sequence import SequenceScheduler
from edge_server.inference.statistics import COUNTERS_ONLY, LatencyMetrics, ModelStatistics
from edge_server.model_config.files import WARMUP_DIRECTORY, reading
from edge_server.process.threads import GivenUp, Hangs, run_with_timeout
from edge_server.requests import InferRequest, InferResponse, Reply
from edge_server.tensors import (
    DataType,
    Tensor,
    first_tensor,
    random_data,
    shape_fits,
    shape_text,
    zeros,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from edge_server.backends.contract import Instance, Tensors
    from edge_server.inference.line import RateLimiter
    from edge_server.inference.registry import Scheduler
    from edge_server.model_config.config import ModelConfig, Placement
    from edge_server.model_config.scheduling import Warmup, WarmupInput
    from edge_server.requests import Respond, ResponseCallback


# The approximate size of an entry, and of each of its tensors, beside the elements.
_ENTRY_BYTES = 400
_TENSOR_BYTES = 300
# A Python object of `bytes` and the reference to it.
_ELEMENT_BYTES = 41


class ResponseCache:
    """Keeps read-only copies of whole responses, up to `capacity_bytes`; for any thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        # The most recently used entry is last.
        self._entries: OrderedDict[tuple[object, bytes], tuple[InferResponse, int]] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def get(self, owner: object, key: bytes) -> InferResponse | None:
        """The response stored by `owner`, one loaded model; no other one shares its responses."""
        with self._lock:
            entry = self._entries.get((owner, key))
            if entry is None:
                return None
            self._entries.move_to_end((owner, key))
            return entry[0]

    def put(self, owner: object, key: bytes, response: InferResponse) -> None:
        """Store a copy of `response` in place of the least recently used ones, unless it is too
        large.
        """
        entry_bytes = _ENTRY_BYTES + sum(map(size_bytes, response.outputs.values()))
        if entry_bytes > self._capacity_bytes:
            return
        outputs = {name: _read_only_copy(tensor) for name, tensor in response.outputs.items()}
        copy = replace(response, outputs=outputs, timings=(), parameters=dict(response.parameters))
        with self._lock:
            self._drop((owner, key))
            while self._used_bytes + entry_bytes > self._capacity_bytes:
                self._drop(next(iter(self._entries)))
            self._entries[owner, key] = (copy, entry_bytes)
            self._used_bytes += entry_bytes

    def forget(self, owner: object) -> None:
        with self._lock:
            for key in [key for key in self._entries if key[0] is owner]:
                self._drop(key)

    def _drop(self, key: tuple[object, bytes]) -> None:
        if key in self._entries:
            self._used_bytes -= self._entries.pop(key)[1]


class CachingScheduler(SchedulerWrapper):
    """Responds from the cache where it can, and passes all other requests on to `scheduler`. Only
    for models that send one response per request, which depends on nothing but the request.
    Requests of a sequence bypass the cache: a member of an ensemble may keep its state, and the
    response says the place in it; so do those with tensors on a device."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: ResponseCache,
        config: ModelConfig,
        statistics: ModelStatistics,
    ) -> None:
        super().__init__(scheduler)
        self._cache = cache
        self._output_names = tuple(spec.name for spec in config.outputs)
        self._statistics = statistics

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        on_device = any(tensor.on_device for tensor in request.inputs.values())
        if on_device or request.sequence is not None:
            self.beneath.submit(request, snapshot, respond)
            return
        if request.on_device:
            request = replace(request, on_device=False)
        began_ns = time.monotonic_ns()
        names = request.outputs or self._output_names
        key = key_of(request, names)
        cached = self._cache.get(self, key)
        looked_up_ns = time.monotonic_ns() - began_ns
        if cached is not None:
            outputs = {name: cached.outputs[name] for name in names if name in cached.outputs}
            self._statistics.hit(looked_up_ns)
            respond(replace(cached, id=request.id, outputs=outputs), True)
            return

        def store(response: ResponseCallback, final: bool) -> None:
            try:
                if isinstance(response, InferResponse):
                    insert_ns = time.monotonic_ns()
                    self._cache.put(self, key, response)
                    self._statistics.missed(looked_up_ns + time.monotonic_ns() - insert_ns)
            finally:
                # Also where there is no memory for the copy.
                respond(response, final)

        self.beneath.submit(request, snapshot, store)

    def close(self) -> None:
        super().close()
        self._cache.forget(self)


def key_of(request: InferRequest, names: tuple[str, ...]) -> bytes:
    """A 128-bit key that differs wherever requested outputs, inputs or parameters do.

    The order of inputs and outputs makes no difference.
    """
    digest = hashlib.blake2b(digest_size=16)
    parameters = sorted(
        (name, type(value).__name__, value) for name, value in request.parameters.items()
    )
    digest.update(repr((sorted(names), parameters)).encode())
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        # `repr` quotes, so no name can pass for the end of another; the shape gives the number of
        # bytes that follow.
        digest.update(repr((name, tensor.datatype.value, tensor.shape)).encode())
        if tensor.datatype is DataType.BYTES:
            for element in tensor.array.flat:
                digest.update(len(element).to_bytes(8, "little") + element)
        else:
            digest.update(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8))
    return digest.digest()


def _read_only_copy(tensor: Tensor) -> Tensor:
    array = tensor.array.copy()
    array.flags.writeable = False
    return Tensor(array)


def size_bytes(tensor: Tensor) -> int:
    """The approximate memory of a tensor, with its elements where they are Python objects."""
    total_bytes: int = _TENSOR_BYTES + tensor.array.nbytes
    if tensor.array.dtype.hasobject:
        total_bytes += sum(_ELEMENT_BYTES + len(element) for element in tensor.array.flat)
    return total_bytes


log = logging.getLogger(__name__)

# A decoupled model may respond after `execute` has returned, within this time.
RESPONSE_TIMEOUT_S = 60.0
# The longest run of a model before it serves; longer than the wait for a late response.
RUN_TIMEOUT_S = 90.0
# An execution accelerator may build its engines in a model's first run.
_BUILDING_TIMEOUT_S = 600.0


def read_samples(config: ModelConfig, folder: Path) -> list[tuple[Warmup, Mapping[str, Tensor]]]:
    """Read the samples of the configuration, with the data of their files in `folder`; random data
    is the same each time. Raises ModelConfigError where one does not fit the model."""
    samples: list[tuple[Warmup, Mapping[str, Tensor]]] = []
    for warmup in config.warmups:
        try:
            samples.append((warmup, _inputs(config, warmup, folder)))
        except ModelConfigError as error:
            raise ModelConfigError(
                f"model '{config.name}': warm-up sample '{warmup.name}': {error}"
            ) from error
    return samples


class _WarmingModel(Model):
    """Makes instances that have run the samples, which no statistics count, in an empty snapshot; a
    Python model finds the models that serve already. A run that hangs is ended where the backend
    can."""

    def __init__(
        self, config: ModelConfig, model: Model, samples: list[tuple[Warmup, Mapping[str, Tensor]]]
    ) -> None:
        self._config = config
        self._model = model
        self._samples = samples

    def make_instance(self, name: str, placement: Placement) -> Instance:
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
            try:
                for _ in range(warmup.count):
                    note_progress()
                    _run(self._config, instance, inputs)
            except Exception as error:
                why = str(error) if isinstance(error, EdgeServerError) else repr(error)
                raise ModelConfigError(
                    f"model '{self._config.name}': warm-up sample '{warmup.name}' failed: {why}; "
                    "give it data that the model can work on, or remove that model_warmup"
                ) from error


def _run(config: ModelConfig, instance: Instance, inputs: Mapping[str, Tensor]) -> None:
    reply: Reply[Tensors] = Reply()
    request, others = InferRequest(config.name, inputs), Snapshot({})
    instance.execute([ExecuteRequest(inputs, config.output_names, reply, request, others)])
    if not reply.is_over(RESPONSE_TIMEOUT_S if config.decoupled else 0.0):
        raise InternalError("it ended without a response")
    if isinstance(reply.response, EdgeServerError):
        raise reply.response


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


_NO_EFFECT = "model %s: field '%s' has no effect here: the server runs without %s"


class Scheduling:
    """Makes loaded models: instances, statistics and the scheduler, together.

    To be closed when no loaded model runs any more.
    """

    def __init__(
        self,
        limiter: RateLimiter | None = None,
        cache_bytes: int = 0,
        latency_metrics: LatencyMetrics = COUNTERS_ONLY,
    ) -> None:
        self._limiter = limiter
        self._latency_metrics = latency_metrics
        self._watch = LineWatch()
        self._step_threads = StepThreads(watch=self._watch)
        self._watch.add(self._step_threads)
        self._cache = ResponseCache(cache_bytes) if cache_bytes > 0 else None

    def close(self) -> None:
        self._step_threads.close()
        self._watch.close()

    def ensemble(self, config: ModelConfig, version: int) -> LoadedModel:
        statistics = self._statistics(config)
        ensemble = EnsembleScheduler(config, version, statistics, self._step_threads)
        scheduler = self._cached(config, ensemble, statistics)
        return LoadedModel(config, version, scheduler, statistics)

    def model(
        self, config: ModelConfig, version: int, model: Model, directory: Path = Path()
    ) -> LoadedModel:
        """Make a loaded model of a backend's model, warmed up; both are closed together.

        Args: directory: the model's, for the files of its warm-up and of initial states.

        Raises: EdgeServerError: an instance cannot be made or warmed up; nothing is left open.
        """
        statistics = self._statistics(config)
        scheduler = self._of_instances(config, version, model, directory, statistics)
        return LoadedModel(config, version, scheduler, statistics, model)

    def with_instances(
        self, loaded: LoadedModel, config: ModelConfig, directory: Path
    ) -> LoadedModel | None:
        """Make a second loaded model with the instances of `config`, beside `loaded`, warmed up;
        None where `loaded` is closed already, or has no model. Both share model and statistics.
        Raises as `model`."""
        held = loaded.shared(config)
        if held is None:
            return None
        try:
            if held.model is None:
                return None
            scheduler = self._of_instances(
                config, held.version, held.model, directory, held.statistics
            )
            held.model_uses.more()
            return dataclasses.replace(held, scheduler=scheduler, scheduler_uses=RefCount())
        finally:
            held.close()

    def _of_instances(
        self,
        config: ModelConfig,
        version: int,
        model: Model,
        directory: Path,
        statistics: ModelStatistics,
    ) -> Scheduler:
        if config.response_cache and self._cache is None:
            log.warning(
                _NO_EFFECT, config.name, "response_cache", "--cache-config=local,size=BYTES"
            )
        if self._limiter is None and any(g.resources for g in config.instance_groups):
            log.warning(_NO_EFFECT, config.name, "rate_limiter", "--rate-limit=execution_count")
        samples = read_samples(config, directory / WARMUP_DIRECTORY)
        warm = _WarmingModel(config, model, samples) if samples else model
        executor = Executor(config, version, statistics)
        return self._cached(config, self._scheduler(executor, warm, directory), statistics)

    def _statistics(self, config: ModelConfig) -> ModelStatistics:
        bounds_ms = config.first_response_bounds_ms if config.decoupled else ()
        cached = self._cache is not None and config.response_cache
        return ModelStatistics(self._latency_metrics, bounds_ms, config.metric_tags, cached=cached)

    def _cached(
        self, config: ModelConfig, scheduler: Scheduler, statistics: ModelStatistics
    ) -> Scheduler:
        if self._cache is None or not config.response_cache:
            return scheduler
        return CachingScheduler(scheduler, self._cache, config, statistics)

    def _scheduler(self, executor: Executor, model: Model, directory: Path) -> Scheduler:
        config, watch, limiter = executor.config, self._watch, self._limiter
        if (batching := config.sequence_batching) is not None:
            return SequenceScheduler(
                executor, batching, model, directory, watch=watch, limiter=limiter
            )
        pool = InstancePool.of(config, model, limiter)
        if config.dynamic_batching is not None:
            return DynamicBatchScheduler(executor, pool, config.dynamic_batching, watch)
        return DirectScheduler(executor, pool)
