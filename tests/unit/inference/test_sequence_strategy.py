"""Which requests of an instance's sequences run together, and when."""

from __future__ import annotations

import pytest

from edge_server.inference.sequence_book import Choice, DirectStrategy, Head, OldestStrategy


def heads(*slots: int, came_at: float = 0.0) -> list[Head]:
    return [Head(slot, came_at, "same") for slot in slots]


def slots(choice: Choice) -> list[int | None]:
    return [head and head.slot for head in choice.batch]


def test_a_direct_batch_reaches_to_the_highest_row_with_a_request() -> None:
    strategy = DirectStrategy(4, 0.0, 0.0)
    assert slots(strategy.choose(heads(0), 0)) == [0]
    assert slots(strategy.choose(heads(0, 2), 0)) == [0, None, 2]


def test_a_direct_batch_waits_for_use_of_its_rows_but_not_for_long() -> None:
    strategy = DirectStrategy(4, 0.5, 2.0)
    assert strategy.choose(heads(1), 0.5) == Choice((), 1.5)
    assert slots(strategy.choose(heads(1), 2.0)) == [None, 1]
    assert slots(strategy.choose(heads(1, 3), 0.5)) == [None, 1, None, 3]


@pytest.mark.parametrize("strategy", [DirectStrategy(4, 1.0, 0.0), DirectStrategy(4, 0.0, 1.0)])
def test_a_direct_batch_waits_only_where_both_limits_are_given(strategy: DirectStrategy) -> None:
    assert slots(strategy.choose(heads(0), 0)) == [0]


def test_a_row_that_cannot_be_joined_with_the_oldest_is_padding_this_time() -> None:
    mixed = [Head(0, 2.0, "large"), Head(1, 1.0, "small"), Head(2, 3.0, "small")]
    assert slots(DirectStrategy(4, 0.0, 0.0).choose(mixed, 5)) == [None, 1, 2]


def test_the_oldest_requests_go_first() -> None:
    waiting = [Head(0, 3.0, "same"), Head(1, 1.0, "same"), Head(2, 2.0, "same")]
    assert slots(OldestStrategy(2, (), 0.0).choose(waiting, 5)) == [1, 2]


def test_the_largest_preferred_size_that_is_reached_goes_at_once() -> None:
    strategy = OldestStrategy(8, (2, 4), 100.0)
    assert strategy.choose(heads(0), 0.0) == Choice((), 100.0)
    assert slots(strategy.choose(heads(0, 1, 2), 0.0)) == [0, 1]
    assert slots(strategy.choose(heads(*range(5)), 0.0)) == [0, 1, 2, 3]


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    strategy = OldestStrategy(2, (), 100.0)
    assert slots(strategy.choose(heads(0, 1), 0.0)) == [0, 1]
    other = [Head(0, 0.0, "small"), Head(1, 0.5, "large")]
    assert slots(strategy.choose(other, 0.5)) == [0]


def test_no_request_waits_longer_than_the_delay() -> None:
    strategy = OldestStrategy(4, (4,), 2.0)
    assert strategy.choose(heads(0, came_at=1.0), 2.0) == Choice((), 1.0)
    assert slots(strategy.choose(heads(0, came_at=1.0), 3.0)) == [0]
