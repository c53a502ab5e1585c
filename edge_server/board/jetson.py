"""Which Jetson this is: its module by the device tree, its JetPack by the L4T release."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from edge_server.board.resources import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_MODULE_ID = re.compile(r"p(?:3701|3767)-\d{4}")
_CHIPS = MappingProxyType(
    {"nvidia,tegra194": "Xavier", "nvidia,tegra234": "Orin", "nvidia,tegra264": "Thor"}
)

Family = Literal["AGX", "NX", "Nano"]

# "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: ..."
_RELEASE = re.compile(r"R(\d{1,4}) \(release\), REVISION: (\d{1,4})(?:\.(\d{1,4}))?")

# Support of Orin's NVDLA cores: on all modules with cores, on AGX Orin only, on none.
NvdlaSupport = Literal["yes", "agx", "no"]


@dataclass(frozen=True)
class OrinModule:
    """A module; the JetPack decides whether its NVDLA cores are usable, and Linux reports less
    memory than is sold."""

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


@dataclass(frozen=True, order=True)
class L4tRelease:
    """The Linux for Tegra release of a JetPack: 36.4.3."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> L4tRelease | None:
        """Parse the first line of /etc/nv_tegra_release; None for any other text."""
        found = _RELEASE.search(text)
        return None if found is None else cls(*(int(number or 0) for number in found.groups()))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


@dataclass(frozen=True)
class JetPack:
    """One JetPack, from L4T release `since` on; its libraries are built for its Ubuntu's Python."""

    version: str
    since: L4tRelease
    cuda: str
    tensorrt: str
    python: str
    nvdla: NvdlaSupport


def _row(version: str, since: tuple[int, int, int], *brings: str, nvdla: NvdlaSupport) -> JetPack:
    cuda, tensorrt, python = brings
    return JetPack(version, L4tRelease(*since), cuda, tensorrt, python, nvdla)


# From NVIDIA's release notes of JetPack and TensorRT (10.16.1, 11.3, 11.4.1 for NVDLA); oldest
# first. 7.0 and 7.1 are for Thor only. Nothing here is confirmed on a board.
JETPACKS = (
    _row("6.0", (36, 3, 0), "12.2", "8.6.2", "3.10", nvdla="yes"),
    _row("6.1", (36, 4, 0), "12.6", "10.3.0", "3.10", nvdla="yes"),
    _row("6.2", (36, 4, 3), "12.6", "10.3.0", "3.10", nvdla="yes"),
    _row("6.2.1", (36, 4, 4), "12.6", "10.3.0", "3.10", nvdla="yes"),
    _row("6.2.2", (36, 5, 0), "12.6", "10.3.0", "3.10", nvdla="yes"),
    _row("6.2.3", (36, 5, 2), "12.6", "10.3.0", "3.10", nvdla="yes"),
    _row("7.0", (38, 2, 0), "13.0", "10.13.3", "3.12", nvdla="no"),
    _row("7.1", (38, 4, 0), "13.0", "10.13.3", "3.12", nvdla="no"),
    _row("7.2", (39, 2, 0), "13.2", "10.16.2", "3.12", nvdla="no"),
    _row("7.2.1", (39, 2, 1), "13.2", "10.16.2", "3.12", nvdla="no"),
    # NVDLA on this JetPack needs TensorRT 11.4.1, which is installed beside JetPack's own. Its L4T
    # release is not confirmed: any release newer than 7.2.1's counts as this JetPack.
    _row("7.2.2", (39, 2, 2), "13.2", "10.16.2", "3.12", nvdla="agx"),
)
# From the same table, in words; on a device, the number of cores that TensorRT reports decides.
NVDLA_SUPPORT = (
    "NVDLA works with JetPack 6.0 (TensorRT 8.6) and 6.1 to 6.2 (10.3), on AGX Orin also with "
    "TensorRT 11.4.1; not with JetPack 7.2 (10.16), and not on Orin Nano, which has none"
)


def read_l4t(root: Path) -> L4tRelease | None:
    """Return the release of the system below `root`; None where it is no Jetson."""
    return L4tRelease.parse(read_text(root / "etc/nv_tegra_release") or "")


def jetpack_of(release: L4tRelease) -> JetPack | None:
    """Return the JetPack of `release`, or the last earlier one of the same major L4T.

    None where no such JetPack is known, as for a release before 36.3.
    """
    before = [
        jetpack
        for jetpack in JETPACKS
        if jetpack.since <= release and jetpack.since.major == release.major
    ]
    return before[-1] if before else None
