"""Two that publish as one device: each says so, with the remedy, and leaves the broker in peace."""

from __future__ import annotations

import json

import pytest

from edge_server.board.identity import Identity
from edge_server.mqtt import payloads
from edge_server.mqtt.feed import Contest

IDENTITY = Identity("truck-7", "0.1.0", "boot", "edge-truck-7-x")


def birth(session: str, client_id: str = IDENTITY.client_id) -> bytes:
    return json.dumps({"session": session, "client_id": client_id}).encode()


@pytest.fixture
def contest() -> Contest:
    made = Contest(IDENTITY, "mine")
    assert not made.see(birth("of the run before"), retained=True, first=True)
    return made


def test_two_that_end_each_others_connection_pause_longer_and_longer(
    contest: Contest, caplog: pytest.LogCaptureFixture
) -> None:
    # It may have been this device's own connection of before.
    assert contest.lose(taken_over=True) is None
    assert not contest.text
    pauses_s = [contest.lose(taken_over=True) or 0.0 for _ in range(9)]
    assert 2.5 <= pauses_s[0] <= 5.0
    assert 150.0 <= pauses_s[-1] <= 300.0
    assert contest.taken_over == 10
    assert "'edge-truck-7-x', and each ends the other's connection" in contest.text
    assert "device.id (--device-id)" in contest.text
    assert caplog.text.count("another client") == 1


def test_a_broker_that_only_closes_is_seen_through_by_the_others_birth(contest: Contest) -> None:
    assert contest.lose(taken_over=False) is None
    assert contest.see(birth("of the other"), retained=True, first=False)
    assert contest.lose(taken_over=False) is not None
    assert contest.taken_over == 1


def test_a_connection_that_lasts_ends_the_contest(contest: Contest) -> None:
    contest.see(birth("of the other"), retained=False, first=False)
    contest.lose(taken_over=False)
    contest.last(599.0)
    assert contest.text
    contest.last(601.0)
    assert not contest.text
    contest.see(birth("of the other"), retained=False, first=False)
    taken_over = contest.taken_over
    contest.last(601.0)
    assert contest.lose(taken_over=False) is None
    assert contest.taken_over == taken_over


def test_a_network_that_breaks_after_the_other_is_gone_costs_no_pause(contest: Contest) -> None:
    for _ in range(5):
        contest.see(birth("of the other"), retained=True, first=False)
        assert contest.lose(taken_over=False) is not None
    for _ in range(20):  # none of them lasts for long
        contest.see(birth("mine"), retained=True, first=False)
        contest.last(300.0)
        assert contest.lose(taken_over=False) is None
    contest.see(birth("of the other"), retained=True, first=False)
    assert contest.lose(taken_over=False) is not None


def test_another_machine_with_this_name_is_named_once_and_costs_no_pause(
    contest: Contest, caplog: pytest.LogCaptureFixture
) -> None:
    other = birth("of the other", "edge-truck-7-y")
    assert contest.see(other, retained=False, first=False)
    assert not contest.see(other, retained=False, first=False)
    assert "another machine publishes as 'truck-7' too" in contest.text
    assert caplog.text.count("another machine") == 1
    assert contest.lose(taken_over=False) is None
    contest.last(10_000.0)
    assert contest.text


def test_a_run_before_that_publishes_its_birth_again_still_runs(contest: Contest) -> None:
    assert contest.see(birth("of the run before"), retained=False, first=True)
    assert "another client logs in" in contest.text


@pytest.mark.parametrize(
    "payload",
    [
        payloads.meta(IDENTITY, "mine"),
        birth("of the run before"),
        b"",
        b"nonsense",
        b'{"device": "truck-7", "session": 7}',
        b'{"device": "of an earlier release"}',
        b'{"nested": ' + b"[" * 30_000,
    ],
)
def test_its_own_births_and_those_before_are_no_contest(contest: Contest, payload: bytes) -> None:
    assert not contest.see(payload, retained=True, first=False)
    assert not contest.text
