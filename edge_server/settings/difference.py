"""Which settings differ between two readings of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.settings.read import Settings

# What a running daemon changes by itself.
_LIVE = frozenset({"cameras"})


def restart_needed(running: Settings, wanted: Settings) -> list[str]:
    """Return the names (`grpc.port`) of the settings of `wanted` that need a restart."""
    return [
        name
        for field in running.__struct_fields__
        if field not in _LIVE
        for name in _differing(getattr(running, field), getattr(wanted, field), field)
    ]


def _differing(one: Any, other: Any, name: str) -> Iterator[str]:
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        for field in one.__struct_fields__:
            yield from _differing(getattr(one, field), getattr(other, field), f"{name}.{field}")
    elif one != other:
        yield name
