"""Requests of a new version are replayed on its predecessor, and no caller notices."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.model_configs import config_of

from edge_server.backends.contract import TensorModel, Tensors
from edge_server.errors import EdgeServerError, InternalError
from edge_server.inference import mirror as mirror_module
from edge_server.inference.mirror import Fault, Mirror, ReplayTarget
from edge_server.inference.registry import LoadedModel, Snapshot
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.statistics import ModelStatistics
from edge_server.requests import InferRequest, InferResponse
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import Respond

TIMEOUT_S = 30.0
IO = (
    'input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 } '
)
GOOD = InferResponse("m", "2", "", {"b": Tensor(np.ones(1, "<f4"))})


def config(extra: str = "", backend: str = "onnxruntime", name: str = "m") -> ModelConfig:
    text = f'name: "{name}" backend: "{backend}" {IO} {extra}'
    return config_of(text)


def request(array: Any = None, name: str = "m") -> InferRequest:
    return InferRequest(name, {"a": Tensor(np.ones(2, "<f4") if array is None else array)})


class Model:
    """A model that adds one, and keeps what it was given."""

    def __init__(self, name: str = "m", extra: str = "", backend: str = "onnxruntime") -> None:
        self.given: list[Any] = []
        self.error: EdgeServerError | None = None
        self.may_run = threading.Event()
        self.may_run.set()
        self.running = threading.Event()
        self.closed = threading.Event()
        self.loaded = Scheduling().model(
            config(f"instance_group {{ count: 1 }} {extra}", backend, name),
            1,
            TensorModel(self._run),
        )
        self.loaded.model.close = self.closed.set

    def _run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.running.set()
        assert self.may_run.wait(TIMEOUT_S)
        self.given.append(inputs["a"].array)
        if self.error is not None:
            raise self.error
        return {"b": Tensor(inputs["a"].array + np.float32(1))}


@pytest.fixture
def old() -> Model:
    return Model()


def mirror_of(old: LoadedModel, new: ModelConfig | None = None, *members: LoadedModel) -> Mirror:
    new_model = LoadedModel(new or old.config, 2, old.scheduler, ModelStatistics())
    predecessor = ReplayTarget.of(new_model, old, members)
    assert predecessor is not None
    return Mirror(predecessor)


@pytest.fixture
def mirror(old: Model) -> Iterator[Mirror]:
    made = mirror_of(old.loaded)
    yield made
    made.target.close()


def test_a_request_with_a_fault_is_given_to_the_predecessor_and_counts_nowhere(
    old: Model, mirror: Mirror
) -> None:
    mirror.compare(request(), Fault.FAILED)
    assert mirror.is_comparing
    assert mirror.step()
    assert not mirror.is_comparing
    assert mirror.better(Fault.FAILED) == (1, 1)
    assert mirror.better(Fault.NOT_FINITE) == (0, 0)
    old.error = InternalError("no")
    mirror.compare(request(), Fault.FAILED)
    mirror.step()
    assert mirror.better(Fault.FAILED) == (1, 2)
    assert len(old.given) == 2
    counts = old.loaded.statistics.counts()
    assert (counts.success.count, sum(counts.failures.values())) == (0, 0)
    assert not old.loaded.statistics.counts().batches


def test_times_are_compared_of_what_both_calculated(old: Model, mirror: Mirror) -> None:
    lease = old.loaded.scheduler
    responses: list[Any] = []
    lease.submit(request(), Snapshot({}), lambda response, _: responses.append(response))
    mirror.sample(request(), responses[0])
    mirror.step()
    ((new_ns, old_ns),) = mirror.times()
    assert (new_ns > 0, old_ns > 0) == (True, True)
    # A response without a computation has no time.
    mirror.sample(request(), GOOD)
    mirror.step()
    assert (len(mirror.times()), mirror.sampled) == (1, 2)


def test_the_caller_may_write_into_its_inputs_once_it_has_the_response(
    old: Model, mirror: Mirror
) -> None:
    inputs = np.ones(2, "<f4")
    mirror.compare(request(inputs), Fault.FAILED)
    inputs[:] = 7
    mirror.step()
    assert old.given[0].tolist() == [1, 1]


def test_what_waits_is_bounded_in_number_and_in_bytes(old: Model, mirror: Mirror) -> None:
    large = np.ones(12 << 20, "<f4")
    large.flags.writeable = False
    for _ in range(2):
        mirror.compare(request(large), Fault.FAILED)
    for _ in range(20):
        mirror.compare(request(), Fault.FAILED)
    replayed = 0
    while mirror.step():
        replayed += 1
    assert replayed == 8
    assert sum(given.nbytes for given in old.given) == large.nbytes + 7 * 8
    mirror.compare(request(large), Fault.FAILED)
    assert mirror.step()


def test_after_a_sample_there_is_a_rest(mirror: Mirror) -> None:
    assert mirror.wants_sample()
    mirror.sample(request(), GOOD)
    assert not mirror.wants_sample()
    mirror._samples_from_s = 0.0
    mirror.step()
    assert mirror._samples_from_s > 0
    mirror._samples_from_s = 0.0
    assert mirror.wants_sample()


def test_requests_with_a_fault_keep_no_samples_away(mirror: Mirror) -> None:
    mirror.compare(request(), Fault.FAILED)
    assert mirror.step()
    assert mirror.wants_sample()


def test_a_sample_goes_before_requests_with_a_fault_and_there_is_one_at_a_time(
    old: Model, mirror: Mirror
) -> None:
    for _ in range(8):
        mirror.compare(request(), Fault.FAILED)
    assert mirror.wants_sample()
    mirror.sample(request(np.full(2, 5, "<f4")), GOOD)
    mirror._samples_from_s = 0.0
    assert not mirror.wants_sample()
    mirror.step()
    assert old.given[0].tolist() == [5, 5]
    mirror._samples_from_s = 0.0
    assert mirror.wants_sample()


class OnDevice:
    """An array that claims to be on a GPU."""

    shape = (2,)
    dtype = np.dtype("<f4")
    nbytes = 8

    def on_host(self) -> Any:
        return np.full(2, 9, "<f4")


def test_of_what_is_on_a_device_only_requests_with_a_fault_are_copied(
    old: Model, mirror: Mirror
) -> None:
    replayed = request(OnDevice())
    mirror.sample(replayed, GOOD)
    assert not mirror.step()
    assert not mirror.timed
    mirror.compare(replayed, Fault.FAILED)
    mirror.step()
    assert old.given[0].tolist() == [9, 9]


def test_what_only_calculates_is_sampled_and_code_of_others_is_not() -> None:
    python = Model(backend="python")
    mirror = mirror_of(python.loaded)
    assert not mirror.wants_sample()
    mirror.compare(request(), Fault.FAILED)
    mirror.step()
    assert mirror.better(Fault.FAILED) == (1, 1)
    mirror.target.close()


def test_a_replay_that_goes_wrong_ends_the_comparison_and_not_the_thread(
    old: Model, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(mirror.target, "response", no_memory)
    mirror.compare(request(), Fault.FAILED)
    assert mirror.step()
    assert not mirror.comparable
    assert not mirror.is_comparing
    mirror.compare(request(), Fault.FAILED)
    assert not mirror.step()


def test_a_copy_for_which_there_is_no_memory_takes_no_room(
    old: Model, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(array: object) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(mirror_module, "Tensor", no_memory)
        mirror.compare(request(np.ones(12 << 20, "<f4")), Fault.FAILED)
    assert not mirror.step()
    mirror.compare(request(np.ones(12 << 20, "<f4")), Fault.FAILED)
    assert mirror.step()


def test_a_request_that_still_runs_is_replayed_once_for_its_time(
    old: Model, mirror: Mirror
) -> None:
    unfinished = request()
    assert mirror.time_s(unfinished) is not None
    assert mirror.time_s(unfinished) is not None
    assert len(old.given) == 1
    old.error = InternalError("no")
    assert mirror.time_s(request()) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sequence_batching {}", ""),
        ("", "sequence_batching {}"),
        ("model_transaction_policy { decoupled: true }", ""),
        ("", "max_batch_size: 4"),
    ],
)
def test_what_keeps_state_or_is_called_otherwise_is_not_replayed(before: str, after: str) -> None:
    old = LoadedModel(config(before), 1, Model().loaded.scheduler, ModelStatistics())
    new = LoadedModel(config(after), 2, old.scheduler, ModelStatistics())
    assert ReplayTarget.of(new, old, ()) is None


class UsesOthers:
    """A scheduler whose model uses another one."""

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        assert snapshot.model_ready("other", "")
        try:
            snapshot.submit(InferRequest("other", {}), lambda *_: None)
        except EdgeServerError as error:
            respond(error, True)

    def pending(self) -> int:
        return 0

    def running_since(self) -> float:
        return math.inf

    def close(self) -> None: ...


def test_a_model_that_uses_others_is_not_compared_any_more() -> None:
    before = LoadedModel(config(backend="python"), 1, UsesOthers(), ModelStatistics())
    mirror = mirror_of(before)
    mirror.compare(request(), Fault.FAILED)
    mirror.step()
    assert not mirror.comparable
    assert mirror.better(Fault.FAILED) == (0, 0)
    mirror.compare(request(), Fault.FAILED)
    assert not mirror.step()
    mirror.target.close()


def test_an_ensemble_is_replayed_with_the_members_that_it_had() -> None:
    member = Model("inner")
    text = (
        f'name: "e" platform: "ensemble" {IO} ensemble_scheduling {{ step {{ '
        'model_name: "inner" model_version: -1 input_map { key: "a" value: "a" } '
        'output_map { key: "b" value: "b" } } }'
    )
    scheduling = Scheduling()
    ensemble = scheduling.ensemble(config_of(text), 1)
    fresh = LoadedModel(ensemble.config, 2, ensemble.scheduler, ModelStatistics())
    assert ReplayTarget.of(fresh, ensemble, ()) is None
    mirror = mirror_of(ensemble, None, member.loaded)
    assert mirror.target.calculates
    mirror.compare(request(name="e"), Fault.NOT_FINITE)
    mirror.step()
    assert mirror.better(Fault.NOT_FINITE) == (1, 1)
    assert member.loaded.statistics.counts().success.count == 0
    assert ensemble.statistics.counts().success.count == 0
    mirror.target.close()
    member.loaded.close()
    assert member.closed.is_set()
    scheduling.close()


def test_a_predecessor_that_is_closed_already_is_not_used(old: Model) -> None:
    old.loaded.close()
    new = LoadedModel(old.loaded.config, 2, old.loaded.scheduler, ModelStatistics())
    assert ReplayTarget.of(new, old.loaded, ()) is None


def test_a_replay_that_hangs_is_ended_where_its_model_can(
    old: Model, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "MODEL_STUCK_S", 0.05)
    monkeypatch.setattr(mirror_module, "_LOOK_S", 0.02)

    def interrupt(before: float) -> None:
        old.error = InternalError("the run hung and was ended")
        old.may_run.set()

    old.loaded.model.interrupt = interrupt
    old.may_run.clear()
    mirror.compare(request(), Fault.FAILED)
    assert mirror.step()
    assert mirror.better(Fault.FAILED) == (0, 1)
