"""A batch goes to its own process, and to another only while its own is away."""

from __future__ import annotations

import threading
import time
from math import inf

import pytest

from edge_server.backends.python.instance_arbiter import InstanceArbiter
from edge_server.errors import DeadlineExceeded


class Process:
    def __init__(self, *, up: bool = True) -> None:
        self.up = up


def turns_of(*processes: Process, stand_in: bool = True) -> InstanceArbiter[Process]:
    arbiter: InstanceArbiter[Process] = InstanceArbiter(stand_in=stand_in)
    for process in processes:
        arbiter.add(process)
    return arbiter


def test_its_own_process_goes_first() -> None:
    own, other = Process(), Process()
    assert turns_of(other, own).take(own, inf) is own


def test_another_stands_in_while_its_own_is_away() -> None:
    own, other = Process(up=False), Process()
    assert turns_of(own, other).take(own, inf) is other


def test_none_is_taken_where_none_is_up() -> None:
    own, other = Process(up=False), Process(up=False)
    assert turns_of(own, other).take(own, inf) is None


def test_nothing_stands_in_for_what_keeps_state() -> None:
    own, other = Process(up=False), Process()
    assert turns_of(own, other, stand_in=False).take(own, inf) is None


def test_no_process_has_two_batches_at_once() -> None:
    own, other = Process(up=False), Process()
    arbiter = turns_of(own, other)
    arbiter.take(other, inf)
    with pytest.raises(DeadlineExceeded):
        arbiter.take(own, time.monotonic())
    taken: list[Process | None] = []
    thread = threading.Thread(target=lambda: taken.append(arbiter.take(own, inf)))
    thread.start()
    arbiter.give_back(other)
    thread.join(5)
    assert taken == [other]


def test_whoever_waits_is_served_by_what_comes_back() -> None:
    own, other = Process(up=False), Process()
    arbiter = turns_of(own, other)
    arbiter.take(other, inf)
    taken: list[Process | None] = []
    thread = threading.Thread(target=lambda: taken.append(arbiter.take(own, inf)))
    thread.start()
    own.up = True
    arbiter.changed()
    thread.join(5)
    assert taken == [own]
