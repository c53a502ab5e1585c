"""A circle of ensembles is found from each of its members."""

from __future__ import annotations

import pytest

from edge_server.lifecycle.fit import find_cycle


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("self", ["self", "self"]),
        ("a", ["a", "b", "a"]),
        ("b", ["b", "a", "b"]),
        ("c", ["c", "b", "c"]),
        ("outside", []),
        ("leaf", []),
    ],
)
def test_the_shortest_cycle_is_found_from_each_member_and_from_nobody_else(
    name: str, way: list[str]
) -> None:
    members = {
        "self": ["leaf", "self"],
        "a": ["b"],
        "b": ["leaf", "a", "c"],
        "c": ["b"],
        "outside": ["a", "nowhere"],
        "leaf": [],
    }
    assert find_cycle(name, members) == way
