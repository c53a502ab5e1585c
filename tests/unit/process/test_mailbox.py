from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from edge_server.process.mailbox import Mailbox


def test_newest_wins_and_what_it_replaced_is_counted() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for item in (1, 2, 3):
        mailbox.put(item)
    assert mailbox.take(0) == 3
    assert mailbox.dropped == 2


def test_an_item_is_handed_out_once() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.put("only")
    assert mailbox.take(0) == "only"
    assert mailbox.take(0) is None
    assert mailbox.dropped == 0


def test_a_falsy_item_is_an_item() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(0)
    assert mailbox.take(0) == 0


@given(st.lists(st.booleans()))
def test_every_item_is_taken_dropped_or_waiting(puts: list[bool]) -> None:
    mailbox: Mailbox[int] = Mailbox()
    taken = []
    for number, put in enumerate(puts):
        if put:
            mailbox.put(number)
        elif (item := mailbox.take(0)) is not None:
            taken.append(item)
    waiting = mailbox.take(0) is not None
    assert len(taken) + mailbox.dropped + waiting == sum(puts)
    assert taken == sorted(set(taken))


def test_a_waiting_taker_gets_what_is_put() -> None:
    mailbox: Mailbox[int] = Mailbox()
    taken: list[int | None] = []
    taker = threading.Thread(target=lambda: taken.append(mailbox.take(5)))
    taker.start()
    mailbox.put(7)
    taker.join(5)
    assert taken == [7]


def test_close_wakes_a_waiting_taker() -> None:
    mailbox: Mailbox[int] = Mailbox()
    taken: list[int | None] = []
    taker = threading.Thread(target=lambda: taken.append(mailbox.take(60)))
    taker.start()
    mailbox.close()
    taker.join(5)
    assert taken == [None]


def test_the_last_item_can_be_taken_after_close() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.close()
    assert not mailbox.drained
    assert mailbox.take(60) == 1
    assert mailbox.drained
    assert mailbox.take(60) is None


def test_an_item_put_after_close_is_dropped() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.close()
    mailbox.put(1)
    assert mailbox.dropped == 1
    assert mailbox.take(0) is None
