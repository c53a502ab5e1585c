"""The response cache: responses by request content, least recently used dropped first."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from edge_server.inference.registry import SchedulerWrapper
from edge_server.requests import InferResponse
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from edge_server.inference.registry import Scheduler, Snapshot
    from edge_server.inference.statistics import ModelStatistics
    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest, Respond, ResponseCallback

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
    """Responds from the cache where it can, and passes all other requests on to `scheduler`.

    Only for models that send one response per request, which depends on nothing but the request:
    the validation of configurations allows no cache for others.
    Requests of a sequence bypass the cache: a member of an ensemble may keep its state, and the
    response says the place in it. Cached responses are on the host; requests with tensors on a
    device bypass the cache, too.
    """

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
