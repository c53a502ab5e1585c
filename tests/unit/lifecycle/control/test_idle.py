"""A model without requests is unloaded, and its next request loads it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.counted_backend import Counted
from support.waiting import wait_until
from unit.lifecycle.control.world import (
    COUNTED,
    READY,
    TIMEOUT_S,
    UNLOADED,
    World,
    ensemble,
    set_number,
)

from edge_server.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelConfigError,
    NotFound,
    Unavailable,
)
from edge_server.inference.registry import IDLE
from edge_server.model_config.parse import without_effect
from edge_server.requests import InferRequest, Reply
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.counted_backend import CountedBackend, Gate
    from support.model_folders import WriteModel

    from edge_server.requests import InferResponse

LIMIT = 'parameters { key: "idle_unload_s" value { string_value: "60" } } '
BRIEF = COUNTED + LIMIT
IS_IDLE = ("UNAVAILABLE", IDLE)


def pass_time(world: World, seconds: float = 61.0) -> None:
    """Look twice, `seconds` apart."""
    now = time.monotonic()
    world.control.unload_idle(now)
    world.control.unload_idle(now + seconds)


def request(deadline_s: float | None = None, **options: object) -> InferRequest:
    deadline = None if deadline_s is None else time.monotonic() + deadline_s
    inputs = {"a": Tensor(np.zeros(1, np.float32))}
    return InferRequest("m", inputs, deadline=deadline, **options)


@pytest.fixture
def idle(world: World, write_model: WriteModel, counted: CountedBackend) -> World:
    set_number(write_model("m", BRIEF), 5)
    world.control.load("m")
    pass_time(world)
    assert world.states() == {("m", 1): IS_IDLE}
    return world


def test_an_idle_model_holds_nothing_and_is_loaded_by_its_next_request(
    idle: World, counted: CountedBackend
) -> None:
    assert [made.closed for made in counted.made] == [1]
    # It can respond, and so it is ready; clients see its metadata, and its server is ready.
    assert idle.door.model_ready("m", "")
    assert idle.door.server_ready()
    assert idle.door.metadata("m", "").versions == (1,)
    assert idle.control.index(only_ready=True) == []
    assert idle.ask("m") == 5
    assert idle.states() == {("m", 1): READY}
    assert counted.loads["m"] == 2


def test_a_request_that_is_wrong_does_not_load_it(idle: World, counted: CountedBackend) -> None:
    with pytest.raises(InvalidRequest, match="unexpected inference input"):
        idle.ask("m", tensor="x")
    with pytest.raises(NotFound):
        idle.ask("m", "7")
    assert counted.loads["m"] == 1


def test_requests_keep_it_and_one_without_the_parameter_stays(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("m", BRIEF)
    write_model("other", COUNTED)
    world.control.load("m")
    world.control.load("other")
    now = time.monotonic()
    for seconds in (0, 40, 80, 120):
        world.control.unload_idle(now + seconds)
        world.ask("m")
    assert set(world.states().values()) == {READY}
    world.control.unload_idle(now + 130)
    world.control.unload_idle(now + 191)
    assert world.states() == {("m", 1): IS_IDLE, ("other", 1): READY}


def test_a_running_request_keeps_it(
    world: World,
    write_model: WriteModel,
    counted: CountedBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_model("m", BRIEF)
    held, entered = threading.Event(), threading.Event()

    def run(*_: object) -> dict[str, Tensor]:
        entered.set()
        assert held.wait(TIMEOUT_S)
        return {"b": Tensor(np.zeros(1, np.float32))}

    monkeypatch.setattr(Counted, "_run", run)
    world.control.load("m")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(world.ask, "m")
        assert entered.wait(TIMEOUT_S)
        pass_time(world)
        assert world.registry.snapshot.entries["m", 1].state.value == "READY"
        held.set()
        asked.result(TIMEOUT_S)


def test_many_first_requests_cause_one_load(
    idle: World, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    held = gate("m")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(idle.ask, "m") for _ in range(8)]
        assert held.reached.wait(TIMEOUT_S)
        held.open()
        assert [each.result(TIMEOUT_S) for each in asked] == [5] * 8
    assert counted.loads["m"] == 2


def test_a_streamed_request_gets_its_response_too(idle: World) -> None:
    replies: list[InferResponse] = []
    over = threading.Event()

    def respond(response: object, final: bool) -> None:
        replies.append(response)
        over.set()
        assert final

    idle.door.submit(request(), respond)
    assert over.wait(TIMEOUT_S)
    assert replies[0].outputs["b"].array[0] == 5
    # The lease of the request has ended: what was loaded can be closed.
    idle.control.unload("m")
    assert idle.states() == {("m", 1): UNLOADED}


def test_a_request_waits_no_longer_than_its_deadline_and_the_load_goes_on(
    idle: World, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    held = gate("m")
    with pytest.raises(DeadlineExceeded):
        idle.door.infer(request(0.05))
    held.open()
    wait_until(lambda: idle.states() == {("m", 1): READY}, TIMEOUT_S)
    assert idle.ask("m") == 5
    assert counted.loads["m"] == 2


def test_a_cancelled_request_waits_no_longer(idle: World, gate: Callable[[str], Gate]) -> None:
    class Gone:
        cancelled = True

        def when_cancelled(self, callback: Callable[[], None]) -> None:
            callback()

    gate("m")
    with pytest.raises(Cancelled):
        idle.door.infer(request(cancellation=Gone()))


def test_one_that_cannot_be_loaded_again_says_why_and_is_tried_by_each_request(
    idle: World, counted: CountedBackend
) -> None:
    counted.fails["m"] = ModelConfigError("the weights are gone")
    for _ in range(2):
        with pytest.raises(Unavailable, match="was idle, and cannot be loaded again: the weights"):
            idle.ask("m")
    state, reason = idle.states()["m", 1]
    assert (state, reason) == ("UNAVAILABLE", f"{IDLE}; the last one failed: the weights are gone")
    assert counted.loads["m"] == 3
    counted.fails.clear()
    assert idle.ask("m") == 5
    assert idle.states() == {("m", 1): READY}


def test_use_of_an_ensemble_is_use_of_its_members_and_wakes_them(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m", "other"))
    set_number(write_model("m", BRIEF), 5)
    set_number(write_model("other", COUNTED), 2)
    world.control.load("e")
    now = time.monotonic()
    for seconds in (0, 40, 80):
        world.control.unload_idle(now + seconds)
        world.ask("e", tensor="x")
    assert set(world.states().values()) == {READY}
    world.control.unload_idle(now + 81)
    world.control.unload_idle(now + 142)
    assert world.states() == {("e", 1): READY, ("m", 1): IS_IDLE, ("other", 1): READY}
    assert world.ask("e", tensor="x") == 7
    assert world.states()["m", 1] == READY
    assert counted.loads == {"m": 2, "other": 1}


def test_an_ensemble_and_an_idle_member_change_as_any_other(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    model = write_model("m", BRIEF)
    world.control.load("e")
    pass_time(world)
    write_model("e", ensemble("m", "m"))
    world.control.load("e")
    assert world.states() == {("e", 1): READY, ("m", 1): IS_IDLE}
    # A changed model is loaded, as one that was not idle.
    set_number(model, 3)
    world.control.load("m")
    assert world.states() == {("e", 1): READY, ("m", 1): READY}
    assert world.ask("e", tensor="x") == 6
    assert counted.loads["m"] == 2


def test_models_of_cameras_stay_with_their_members(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("lanes", ensemble("m"))
    write_model("m", BRIEF)
    cameras = {"lanes"}
    world = World(repository, kept=cameras).start()
    world.control.load("lanes")
    pass_time(world)
    assert set(world.states().values()) == {READY}
    cameras.clear()
    pass_time(world)
    assert world.states()["m", 1] == IS_IDLE
    world.control.close(TIMEOUT_S)


def test_a_load_on_request_wakes_it_and_an_unload_ends_it(
    idle: World, counted: CountedBackend
) -> None:
    idle.control.load("m")
    assert idle.states() == {("m", 1): READY}
    pass_time(idle)
    idle.control.unload("m")
    assert idle.states() == {("m", 1): UNLOADED}
    with pytest.raises(NotFound, match="has no available versions"):
        idle.ask("m")
    assert counted.loads["m"] == 2


def test_what_is_unloaded_while_it_wakes_is_closed(
    idle: World, counted: CountedBackend, gate: Callable[[str], Gate]
) -> None:
    held = gate("m")
    reply: Reply[InferResponse] = Reply()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(idle.door.submit, request(), reply)
        assert held.reached.wait(TIMEOUT_S)
        idle.control.unload("m")
        held.open()
        with pytest.raises(NotFound):
            asked.result(TIMEOUT_S)
    wait_until(lambda: [made.closed for made in counted.made] == [1, 1], TIMEOUT_S)


def test_the_end_of_the_daemon_ends_the_wait(idle: World, gate: Callable[[str], Gate]) -> None:
    held = gate("m")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(idle.ask, "m")
        assert held.reached.wait(TIMEOUT_S)
        closed = pool.submit(idle.control.close, TIMEOUT_S)
        wait_until(lambda: idle.loader.table.over, TIMEOUT_S)
        held.open()
        # The load may have ended before it was given up.
        with pytest.raises((NotFound, Unavailable)):
            asked.result(TIMEOUT_S)
        closed.result(TIMEOUT_S)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
def test_the_time_is_a_number_of_seconds(
    world: World, write_model: WriteModel, counted: CountedBackend, value: str
) -> None:
    write_model("m", COUNTED + LIMIT.replace("60", value))
    with pytest.raises(InternalError, match=f"'idle_unload_s' is '{value}' for m; give a number"):
        world.control.load("m")


def test_an_ensemble_has_nothing_to_unload(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("m", COUNTED)
    write_model("e", ensemble("m") + LIMIT)
    world.control.load("e")
    pass_time(world)
    assert world.states()["e", 1] == READY
    message = world.door.metadata("e", "").config.message
    assert "its members" in without_effect(message)["parameters"]
