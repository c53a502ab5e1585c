"""Identify the board's Jetson module by its device tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MODULE_ID = re.compile(r"p(?:3701|3767)-\d{4}")
_CHIPS = MappingProxyType(
    {"nvidia,tegra194": "Xavier", "nvidia,tegra234": "Orin", "nvidia,tegra264": "Thor"}
)

Family = Literal["AGX", "NX", "Nano"]


@dataclass(frozen=True)
class OrinModule:
    """Properties of a module.

    Attributes:
        nvdla_cores: number of built-in cores; the JetPack decides whether they are usable.
        memory_gib: as sold; Linux reports less.
    """

    name: str
    family: Family
    nvdla_cores: int
    memory_gib: int


# From NVIDIA's list of module part numbers; not confirmed on a board.
ORIN_MODULES: Mapping[str, OrinModule] = MappingProxyType(
    {
        # Developer kits came with 32 GB, later ones carry -0005.
        "p3701-0000": OrinModule("Jetson AGX Orin 32GB", "AGX", 2, 32),
        "p3701-0004": OrinModule("Jetson AGX Orin 32GB", "AGX", 2, 32),
        "p3701-0005": OrinModule("Jetson AGX Orin 64GB", "AGX", 2, 64),
        "p3701-0008": OrinModule("Jetson AGX Orin Industrial 64GB", "AGX", 2, 64),
        "p3767-0000": OrinModule("Jetson Orin NX 16GB", "NX", 2, 16),
        "p3767-0001": OrinModule("Jetson Orin NX 8GB", "NX", 1, 8),
        "p3767-0003": OrinModule("Jetson Orin Nano 8GB", "Nano", 0, 8),
        "p3767-0004": OrinModule("Jetson Orin Nano 4GB", "Nano", 0, 4),
        "p3767-0005": OrinModule("Jetson Orin Nano 8GB (developer kit)", "Nano", 0, 8),
    }
)


def module_of(compatible: Iterable[str]) -> OrinModule | None:
    """Return the module for the identities of /proc/device-tree/compatible; None if none is
    known."""
    for identity in compatible:
        for module_id in _MODULE_ID.findall(identity):
            if module_id in ORIN_MODULES:
                return ORIN_MODULES[module_id]
    return None


def chip_of(compatible: Iterable[str]) -> str | None:
    """Return Xavier, Orin or Thor; None for another chip."""
    return next((_CHIPS[identity] for identity in compatible if identity in _CHIPS), None)
