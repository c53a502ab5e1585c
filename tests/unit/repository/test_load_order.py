"""Members load before the ensembles that use them; a circle is found from each of its members."""

from __future__ import annotations

import pytest

from edge_server.repository.load_order import circle_through, members_first


def test_members_come_first_and_what_is_no_model_is_left_out() -> None:
    order = members_first({"a": ["b", "nowhere"], "b": ["d", "c"], "c": ["d"], "d": []})
    assert order == ["d", "c", "b", "a"]


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
def test_the_shortest_way_back_is_found_from_each_member_and_from_nobody_else(
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
    assert circle_through(name, members) == way
