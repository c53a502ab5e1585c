"""In which order models load: the members of an ensemble before the ensemble."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Members = Mapping[str, Sequence[str]]


def members_first(members: Members) -> list[str]:
    """The models so that each comes after its members.

    Args:
        members: model → the models that it uses, without circles; who is no key is left out.
    """
    return [name for name in TopologicalSorter(members).static_order() if name in members]


def circle_through(name: str, members: Members) -> list[str]:
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
