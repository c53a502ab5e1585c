"""Finds dependency cycles between ensembles, which can never load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def circle_through(name: str, members: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the shortest cycle from `name` through members back to `name`, both ends included.

    The list is empty if there is no cycle.
    """
    ways, seen = [[name]], set[str]()
    for way in ways:  # grows while it is walked
        for member in members.get(way[-1], ()):
            if member == name:
                return [*way, name]
            if member not in seen:
                seen.add(member)
                ways.append([*way, member])
    return []
