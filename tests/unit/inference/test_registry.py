"""A request keeps the world it started in; a model is closed once, when nobody can need it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_configs import config_of
from support.waiting import wait_until
from unit.inference.threads import no_more_threads

from edge_server.errors import InvalidRequest, NotFound, Unavailable
from edge_server.inference.registry import (
    LoadedModel,
    ModelEntry,
    ModelRegistry,
    ModelState,
    Snapshot,
)
from edge_server.inference.statistics import ModelStatistics

if TYPE_CHECKING:
    from edge_server.requests import InferRequest, Respond

CONFIG = config_of('name: "m" backend: "identity"')


TIMEOUT_S = 30.0


class CountsCloses:
    """A scheduler that knows how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        raise NotImplementedError

    def running_since(self) -> float:
        return math.inf

    def close(self) -> None:
        self.closed += 1


def ready(scheduler: CountsCloses, name: str = "m", version: int = 1) -> ModelEntry:
    loaded = LoadedModel(CONFIG, version, scheduler, ModelStatistics())
    return ModelEntry(name, version, ModelState.READY, loaded=loaded)


def test_a_replaced_model_is_closed_with_its_last_lease() -> None:
    registry, old, new = ModelRegistry(), CountsCloses(), CountsCloses()
    registry.replace("m", [ready(old)])
    outer, inner = registry.lease(), registry.lease()
    registry.replace("m", [ready(new)])
    inner.release()
    assert old.closed == 0
    assert outer.snapshot.find("m").scheduler is old
    assert registry.snapshot.find("m").scheduler is new
    outer.release()
    assert registry.wait_closed(TIMEOUT_S)
    assert (old.closed, new.closed) == (1, 0)


def test_a_lease_that_is_released_twice_takes_no_other_s_away() -> None:
    registry, old = ModelRegistry(), CountsCloses()
    registry.replace("m", [ready(old)])
    outer, inner = registry.lease(), registry.lease()
    inner.release()
    inner.release()
    registry.replace("m", [ready(CountsCloses())])
    assert old.closed == 0
    outer.release()
    assert registry.wait_closed(TIMEOUT_S)
    assert old.closed == 1


def test_models_are_closed_later_where_the_system_gives_no_thread() -> None:
    registry, old = ModelRegistry(), CountsCloses()
    registry.replace("m", [ready(old)])
    with no_more_threads():
        registry.replace("m", [ready(CountsCloses())])
    assert not registry.wait_closed(0.0)
    registry.replace("n", [])
    assert registry.wait_closed(TIMEOUT_S)
    assert old.closed == 1


def test_replacing_one_model_leaves_the_others() -> None:
    registry, kept, other = ModelRegistry(), CountsCloses(), CountsCloses()
    registry.replace("kept", [ready(kept, "kept")])
    registry.replace("other", [ready(other, "other")])
    registry.replace("other", [])
    assert registry.wait_closed(TIMEOUT_S)
    assert (kept.closed, other.closed) == (0, 1)
    assert registry.snapshot.find("kept").scheduler is kept


def test_what_is_named_no_more_is_unloading_until_its_last_lease_ends_then_unloaded() -> None:
    registry, old, other = ModelRegistry(), CountsCloses(), CountsCloses()
    registry.publish({"m": [ready(old)], "n": [ready(other, "n")]})
    lease = registry.lease()
    registry.publish({"m": [ready(CountsCloses(), version=2)]})
    assert registry.snapshot.entries["m", 1].state is ModelState.UNLOADING
    lease.release()
    assert registry.wait_closed(TIMEOUT_S)
    entry = registry.snapshot.entries["m", 1]
    assert (entry.state, entry.reason) == (ModelState.UNAVAILABLE, "unloaded")
    assert registry.snapshot.ready_versions("m") == [2]
    assert (old.closed, other.closed) == (1, 0)


def test_a_version_that_is_loaded_anew_before_the_old_one_is_gone_stays_ready() -> None:
    registry = ModelRegistry()
    registry.replace("m", [ready(CountsCloses())])
    lease = registry.lease()
    registry.replace("m", [])
    registry.replace("m", [ready(CountsCloses())])
    lease.release()
    assert registry.wait_closed(TIMEOUT_S)
    assert registry.snapshot.entries["m", 1].state is ModelState.READY


def test_a_model_whose_last_lease_ends_on_its_own_thread_is_closed_on_another() -> None:
    class KnowsItsCloser(CountsCloses):
        def close(self) -> None:
            super().close()
            self.closer = threading.current_thread()

    registry, old = ModelRegistry(), KnowsItsCloser()
    registry.replace("m", [ready(old)])
    lease = registry.lease()
    registry.replace("m", [])
    lease.release()
    assert registry.wait_closed(TIMEOUT_S)
    assert old.closer is not threading.current_thread()


def test_a_model_that_cannot_be_closed_does_not_keep_others_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn(CountsCloses):
        def close(self) -> None:
            raise ZeroDivisionError

    registry, other = ModelRegistry(), CountsCloses()
    registry.replace("m", [ready(Stubborn()), ready(other, version=2)])
    registry.replace("m", [])
    assert registry.wait_closed(TIMEOUT_S)
    assert other.closed == 1
    assert registry.snapshot.entries["m", 1].reason == "unloaded"
    assert "model m: closing version 1 failed" in caplog.text


def test_models_close_side_by_side() -> None:
    together = threading.Barrier(4, timeout=TIMEOUT_S)

    class Waits(CountsCloses):
        def close(self) -> None:
            together.wait()
            super().close()

    registry, schedulers = ModelRegistry(), [Waits() for _ in range(4)]
    for number, scheduler in enumerate(schedulers):
        registry.replace(f"m{number}", [ready(scheduler, f"m{number}")])
    assert registry.clear(TIMEOUT_S)
    assert [scheduler.closed for scheduler in schedulers] == [1] * 4


def test_one_that_does_not_close_holds_up_nobody_for_longer_than_is_said() -> None:
    let_go = threading.Event()

    class Hangs(CountsCloses):
        def close(self) -> None:
            let_go.wait(TIMEOUT_S)

    registry, other = ModelRegistry(), CountsCloses()
    registry.replace("m", [ready(Hangs()), ready(other, version=2)])
    assert not registry.clear(0.05)
    wait_until(lambda: other.closed == 1)
    let_go.set()
    assert registry.wait_closed(TIMEOUT_S)


@given(st.lists(st.sampled_from(["swap", "lease", "release", "clear"]), max_size=40))
def test_no_model_is_closed_under_a_lease_nor_twice_nor_never(actions: list[str]) -> None:
    registry = ModelRegistry()
    made: list[CountsCloses] = []
    leases = []
    for action in [*actions, "clear"]:
        if action == "swap":
            made.append(CountsCloses())
            registry.replace("m", [ready(made[-1])])
        elif action == "clear":
            registry.clear()
        elif action == "lease":
            leases.append(registry.lease())
        elif leases:
            leases.pop(0).release()
        for lease in leases:
            for entry in lease.snapshot.entries.values():
                assert entry.loaded is not None
                assert entry.loaded.scheduler.closed == 0  # type: ignore[attr-defined]  # this scheduler has it
    for lease in leases:
        lease.release()
    assert registry.wait_closed(TIMEOUT_S)
    assert [scheduler.closed for scheduler in made] == [1] * len(made)


def test_lookup_failures_are_told_in_the_contracts_words() -> None:
    registry = ModelRegistry()
    registry.replace("m", [ready(CountsCloses()), ModelEntry("m", 2, ModelState.LOADING)])
    registry.replace("failed", [ModelEntry("failed", 0, ModelState.UNAVAILABLE, "why")])
    find = registry.snapshot.find
    assert find("m", "1").version == 1
    assert find("m").version == 1
    for name, version, error, text in (
        ("no", "", NotFound, "Request for unknown model: 'no' is not found"),
        ("failed", "", NotFound, "Request for unknown model: 'failed' has no available versions"),
        ("m", "3", NotFound, "Request for unknown model: 'm' version 3 is not found"),
        ("m", "2", Unavailable, "Request for unknown model: 'm' version 2 is not at ready state"),
        *(
            (
                "m",
                text,
                InvalidRequest,
                f"failed to get model version from specified version string '{text}' (details: "
                "stol), version should be an integral value > 0",
            )
            for text in ("x", "+1", " 1", "1_0", "\u0661", str(2**64), "1\n")
        ),
        (
            "m",
            "01",
            InvalidRequest,
            "invalid model version specified '01' , version should be an integral value > 0",
        ),
        (
            "m",
            "-1",
            InvalidRequest,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
    ):
        with pytest.raises(error) as caught:
            find(name, version)
        assert str(caught.value) == text
