"""Tables and numbers are for people."""

from __future__ import annotations

import pytest

from edge_server.cli.tables import duration_text, number, size_text, table


def test_texts_are_put_left_and_numbers_right_in_columns() -> None:
    rows = [("NAME", "COUNT", "STATE"), ("a", "7", "READY"), ("longer", "123", "-")]
    assert table(rows, left=(0, 2)) == [
        "NAME    COUNT  STATE",
        "a           7  READY",
        "longer    123  -",
    ]


def test_an_unknown_number_is_no_zero() -> None:
    assert (number(None), number(0.04), number(12.34, 0)) == ("-", "0.0", "12")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_sizes_are_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (61, "1 min 1 s"),
        (7500, "2 h 5 min"),
        (86400, "1 d 0 h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
