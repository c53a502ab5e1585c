"""A full house turns callers away at once, and a place is free again when its caller leaves."""

from __future__ import annotations

import pytest

from edge_server.errors import Unavailable
from edge_server.grpc_api.admission import Admission


def test_one_too_many_is_turned_away_and_may_come_again() -> None:
    admission = Admission(2)
    with admission.admit():
        with (
            admission.admit(),
            pytest.raises(Unavailable, match="Exceeds maximum queue size"),
            admission.admit(),
        ):
            raise AssertionError("nobody is let in")
        with admission.admit():
            pass


def test_a_place_is_given_back_when_the_inference_fails() -> None:
    admission = Admission(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), admission.admit():
            raise ValueError("broken")
