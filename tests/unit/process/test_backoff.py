"""Backoff: doubles up to a limit, never falls below half, begins again when told."""

from __future__ import annotations

from itertools import islice

import pytest

from edge_server.process.threads import Backoff


@pytest.mark.parametrize(("drawn", "part"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_delays_double_between_half_and_whole(drawn: float, part: float) -> None:
    backoff = Backoff(0.5, 30.0, draw=lambda: drawn)
    wholes = [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [*islice(iter(backoff.next_s, None), 8)] == [whole * part for whole in wholes]


def test_reset_begins_again() -> None:
    backoff = Backoff(0.5, 30.0, draw=lambda: 1.0)
    backoff.next_s(), backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.5
