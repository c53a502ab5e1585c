"""Ensembles that use each other in a circle can never load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def circle_through(name: str, members: Mapping[str, Sequence[str]]) -> list[str]:
    """The shortest way from `name` through members back to itself, both ends included.

    Empty where there is none.
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
