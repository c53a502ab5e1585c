"""Tensors on a device are handed from step to step, and copied only for who works on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from unit.inference.ensembles import (
    Models,
    Responses,
    config,
    ensemble_config,
    models_of,
    plus,
    running,
    value,
)

from edge_server.errors import InternalError
from edge_server.inference.canary_monitor import WatchedScheduler
from edge_server.inference.line import StepThreads
from edge_server.inference.registry import ModelEntry, ModelState
from edge_server.inference.scheduling import CachingScheduler, ResponseCache, Scheduling
from edge_server.model_config.config import ModelConfig, Placement
from edge_server.requests import InferRequest, InferResponse
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest
    from edge_server.inference.registry import Snapshot

VALUE = value(0, 1, 2)
NO_COPIES = {"to_host": (0, 0), "to_device": (0, 0)}


@dataclass
class OnDevice:
    """A `DeviceArray` of a device that is none: numpy tells it apart all the same."""

    hidden: NDArray[Any]
    broken: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.hidden.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.hidden.dtype

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes

    def reshape(self, shape: tuple[int, ...]) -> OnDevice:
        return OnDevice(self.hidden.reshape(shape))

    def on_host(self) -> NDArray[Any]:
        if self.broken:
            raise InternalError("the device is gone")
        return self.hidden.copy()

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError("only `on_host` copies")


class PlusOneOnDevice:
    """A model, and its instance, that works on the device; where given a host array it uploads."""

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def make_instance(self, name: str, placement: Placement) -> PlusOneOnDevice:
        return self

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            given = request.inputs["a"]
            array = given.on_device
            if array is None:
                request.copied("to_device", given.array.nbytes)
                array = OnDevice(given.array)
            assert isinstance(array, OnDevice)
            made: Any = OnDevice(array.hidden + np.float32(1), self._broken)
            request.respond(dict.fromkeys(request.outputs, Tensor(made)), True)

    def not_ready_reason(self) -> str:
        return ""

    def metrics(self) -> tuple[()]:
        return ()

    def close(self) -> None: ...


ON_GPU = "instance_group { kind: KIND_GPU count: 1 gpus: 0 }"


def on_device(name: str, *, broken: bool = False, extra: str = "") -> ModelEntry:
    of: ModelConfig = config(name, "a", "b", ON_GPU + extra)
    loaded = Scheduling().model(of, 1, PlusOneOnDevice(broken=broken))
    return ModelEntry(name, 1, ModelState.READY, loaded=loaded)


def copies(snapshot: Snapshot, name: str) -> dict[str, tuple[int, int]]:
    counted = snapshot.find(name, "").statistics.counts().copies
    return {str(way): (each.count, each.n_bytes) for way, each in counted.items()}


def test_between_steps_on_a_device_nothing_is_copied() -> None:
    snapshot = models_of(
        ensemble_config("e", "x", "y", "first a=x > b=t", "second a=t > b=u", "host a=u > b=y"),
        on_device("first"),
        on_device("second"),
        running("host", plus(10)),
    ).snapshot
    response = snapshot.infer(InferRequest("e", {"x": VALUE}))
    np.testing.assert_array_equal(response.outputs["y"].array, VALUE.array + 12)
    assert copies(snapshot, "first") == {"to_host": (0, 0), "to_device": (1, 12)}
    # As that step works on the host, the one before it brings the tensor there: it may have mapped
    # memory for that.
    assert copies(snapshot, "second") == {"to_host": (1, 12), "to_device": (0, 0)}
    assert copies(snapshot, "host") == copies(snapshot, "e") == NO_COPIES


def test_an_ensembles_own_response_is_on_the_host() -> None:
    snapshot = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), on_device("m")).snapshot
    response = snapshot.infer(InferRequest("e", {"x": VALUE}))
    assert isinstance(response.outputs["y"].array, np.ndarray)
    assert copies(snapshot, "e") == NO_COPIES
    assert copies(snapshot, "m") == {"to_host": (1, 12), "to_device": (1, 12)}


def test_what_a_step_reads_and_the_response_has_too_is_copied_by_the_ensemble() -> None:
    snapshot = models_of(
        ensemble_config("e", "x", "y z", "m a=x > b=y", "n a=y > b=z"),
        on_device("m"),
        on_device("n"),
    ).snapshot
    response = snapshot.infer(InferRequest("e", {"x": VALUE}))
    np.testing.assert_array_equal(response.outputs["y"].array, VALUE.array + 1)
    np.testing.assert_array_equal(response.outputs["z"].array, VALUE.array + 2)
    assert copies(snapshot, "e") == {"to_host": (1, 12), "to_device": (0, 0)}
    assert copies(snapshot, "m") == {"to_host": (0, 0), "to_device": (1, 12)}
    assert copies(snapshot, "n") == {"to_host": (1, 12), "to_device": (0, 0)}


def test_an_ensemble_within_takes_tensors_on_a_device_where_one_of_its_steps_does() -> None:
    entries = on_device("first"), on_device("inner"), running("host", plus(10))
    for inner, expected in (("inner a=u > b=v", 0), ("host a=u > b=v", 1)):
        snapshot = Models(
            (
                ensemble_config("within", "u", "v", inner),
                ensemble_config("e", "x", "y", "first a=x > b=t", "within u=t > v=y"),
            ),
            entries,
            StepThreads(),
        ).snapshot
        before = copies(snapshot, "first")["to_host"][0]
        snapshot.infer(InferRequest("e", {"x": VALUE}))
        assert copies(snapshot, "first")["to_host"][0] - before == expected


def test_a_caller_that_does_not_request_tensors_on_a_device_gets_none() -> None:
    snapshot = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), on_device("m")).snapshot
    host = snapshot.infer(InferRequest("m", {"a": VALUE})).outputs["b"]
    assert host.on_device is None
    stays = snapshot.infer(InferRequest("m", {"a": VALUE}, on_device=True)).outputs["b"]
    assert isinstance(stays.on_device, OnDevice)
    stays = snapshot.infer(InferRequest("e", {"x": VALUE}, on_device=True)).outputs["y"]
    assert isinstance(stays.on_device, OnDevice)


def test_a_device_that_fails_while_it_is_read_fails_the_request() -> None:
    snapshot = models_of(
        ensemble_config("e", "x", "y", "m a=x > b=t", "host a=t > b=y"),
        on_device("m", broken=True),
        running("host", plus(10)),
    ).snapshot
    for asked in (InferRequest("m", {"a": VALUE}), InferRequest("e", {"x": VALUE})):
        responses = Responses()
        snapshot.submit(asked, responses)
        ((response, final),) = responses.responses
        assert final
        assert isinstance(response, InternalError)
        assert "the device is gone" in str(response)


def test_a_tensor_on_a_device_is_reshaped_there() -> None:
    of = config("m", "a", "b").message
    of.max_batch_size = 0
    of.output[0].dims[:] = [3, 1]
    of.output[0].reshape.shape[:] = [3]
    loaded = Scheduling().model(ModelConfig.of(of), 1, PlusOneOnDevice())
    snapshot = models_of(
        ensemble_config("e", "x", "y", "other a=x > b=y"),
        on_device("other"),
        ModelEntry("m", 1, ModelState.READY, loaded=loaded),
    ).snapshot
    made = snapshot.infer(InferRequest("m", {"a": VALUE}, on_device=True)).outputs["b"]
    assert made.on_device is not None
    assert made.shape == (3, 1)


def test_what_is_looked_at_or_kept_is_on_the_host() -> None:
    entry = on_device("m", extra="response_cache { enable: true }")
    assert entry.loaded is not None
    snapshot = models_of(ensemble_config("e", "x", "y", "m a=x > b=y"), entry).snapshot
    loaded = entry.loaded
    cached = CachingScheduler(
        loaded.scheduler, ResponseCache(1 << 20), loaded.config, loaded.statistics
    )
    asks = InferRequest("m", {"a": VALUE}, on_device=True)
    for scheduler in (cached, WatchedScheduler(loaded.scheduler, loaded.config, 8)):
        responses = Responses()
        scheduler.submit(asks, snapshot, responses)
        ((response, _),) = responses.responses
        assert isinstance(response, InferResponse)
        assert response.outputs["b"].on_device is None
    there: Any = OnDevice(VALUE.array)
    responses = Responses()
    cached.submit(InferRequest("m", {"a": Tensor(there)}, on_device=True), snapshot, responses)
    ((response, _),) = responses.responses
    assert isinstance(response, InferResponse)
    assert response.outputs["b"].on_device is not None
