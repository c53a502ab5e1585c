"""What a board is, by its files: a Jetson, by its device tree and its L4T release, a desktop, a
container."""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from edge_server.board import device_nodes
from edge_server.board.facts import BoardFacts, read_within
from edge_server.board.resources import (
    GroupLimits,
    is_directory,
    is_there,
    read_group_limits,
    read_text,
)
from edge_server.board.watch import WallClock, read_wall_clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
    """A module; the JetPack decides whether its NVDLA cores are usable."""

    name: str
    family: Family
    nvdla_cores: int


# From NVIDIA's list of module part numbers; not confirmed on a board.
ORIN_MODULES: Mapping[str, OrinModule] = MappingProxyType(
    {
        # Developer kits came with 32 GB, later ones carry -0005.
        "p3701-0000": OrinModule("Jetson AGX Orin 32GB", "AGX", 2),
        "p3701-0004": OrinModule("Jetson AGX Orin 32GB", "AGX", 2),
        "p3701-0005": OrinModule("Jetson AGX Orin 64GB", "AGX", 2),
        "p3701-0008": OrinModule("Jetson AGX Orin Industrial 64GB", "AGX", 2),
        "p3767-0000": OrinModule("Jetson Orin NX 16GB", "NX", 2),
        "p3767-0001": OrinModule("Jetson Orin NX 8GB", "NX", 1),
        "p3767-0003": OrinModule("Jetson Orin Nano 8GB", "Nano", 0),
        "p3767-0004": OrinModule("Jetson Orin Nano 4GB", "Nano", 0),
        "p3767-0005": OrinModule("Jetson Orin Nano 8GB (developer kit)", "Nano", 0),
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


# /proc/device-tree is a link to the second path, and leaves a root that is not the system's own.
_DEVICE_TREES = ("proc/device-tree", "sys/firmware/devicetree/base")
# A sensor on a broken bus may hold its reader for ever.
_SENSORS_S = 5.0

UNIT = "edge-server.service"
# In systemd's order: the first unit hides the others.
_DIRECTORIES = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system")
_USER = re.compile(r"^User=(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class UnitFile:
    """The daemon's unit; `user` is None where it runs as root."""

    path: str
    user: str | None


@dataclass(frozen=True)
class Board:
    """What a board is and how it runs; None where the files do not give a fact.

    Attributes:
        account: the account whose rights `gpu_nodes` and `cameras` state.
        chip: Xavier, Orin or Thor.
        cuda: the version of the toolkit.
        facts: how it runs now; None where a file of its sensors cannot be read.
        argus: the daemon of CSI cameras has its socket in /tmp.
    """

    account: device_nodes.Account
    model: str | None
    chip: str | None
    module: OrinModule | None
    l4t: L4tRelease | None
    jetpack: JetPack | None
    kernel: str | None
    cuda: str | None
    facts: BoardFacts | None
    limits: GroupLimits
    gpu_nodes: tuple[device_nodes.DeviceNode, ...]
    cameras: tuple[device_nodes.DeviceNode, ...]
    argus: bool
    wall_clock: WallClock
    systemd: bool
    unit: UnitFile | None

    @property
    def is_jetson(self) -> bool:
        return self.chip is not None or self.l4t is not None


def read_board(root: Path = Path("/"), now_s: float | None = None) -> Board:
    """Read the board whose system is below `root`; run no program, and never raise for a missing
    file.

    Rights are those of the user of the daemon's unit if that is installed, otherwise of this
    process.
    """
    unit = _find_unit_file(root)
    account = None if unit is None else device_nodes.find_account(root, unit.user or "root")
    account = account or device_nodes.this_account(root)
    compatible = tuple((_device_tree(root, "compatible") or "").split("\0"))
    chip = chip_of(compatible)
    l4t = read_l4t(root)
    return Board(
        account=account,
        model=_device_tree(root, "model"),
        chip=chip,
        module=module_of(compatible),
        l4t=l4t,
        jetpack=None if l4t is None else jetpack_of(l4t),
        kernel=read_text(root / "proc/sys/kernel/osrelease"),
        cuda=_cuda(root),
        facts=read_within(_SENSORS_S, root),
        limits=read_group_limits(root),
        gpu_nodes=device_nodes.read_gpu_nodes(
            root, account, jetson=chip is not None or l4t is not None
        ),
        cameras=device_nodes.read_cameras(root, account),
        argus=is_there(root / "tmp/argus_socket"),
        wall_clock=read_wall_clock(root, time.time() if now_s is None else now_s),
        # The test of sd_booted(3).
        systemd=is_directory(root / "run/systemd/system"),
        unit=unit,
    )


def _find_unit_file(root: Path) -> UnitFile | None:
    """Return the daemon's unit below `root`; drop-ins are not read."""
    for directory in _DIRECTORIES:
        text = read_text(root / directory / UNIT)
        if text is not None:
            user = _USER.findall(text)
            return UnitFile(f"/{directory}/{UNIT}", user[-1] if user else None)
    return None


def is_jetson() -> bool:
    root = Path("/")
    compatible = (_device_tree(root, "compatible") or "").split("\0")
    return chip_of(compatible) is not None or read_l4t(root) is not None


def _device_tree(root: Path, name: str) -> str | None:
    for tree in _DEVICE_TREES:
        text = read_text(root / tree / name)
        if text is not None:
            return text
    return None


def _cuda(root: Path) -> str | None:
    try:
        version = json.loads(read_text(root / "usr/local/cuda/version.json") or "")
        return str(version["cuda"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Identity:
    """The names under which one daemon publishes.

    Attributes:
        device: its name, the level of its topics.
        boot_id: changes with every boot; monotonic times compare only within one.
        client_id: the same after every restart, different on every machine. A broker would
            disconnect two machines with one client id in turn for ever, and a device name is
            easily cloned with an image.
    """

    device: str
    version: str
    boot_id: str
    client_id: str

    @classmethod
    def of_this_host(cls, device: str, version: str, root: Path = Path("/")) -> Identity:
        """Return the identity of the machine whose files are under `root`."""
        machine = _first_line(root / "etc/machine-id") or platform.node()
        # machine-id(5) asks applications to publish a keyed hash instead of the id itself.
        digest = hmac.new(machine.encode(), b"edge_server mqtt", hashlib.sha256).hexdigest()
        boot = boot_id(root) or str(uuid.uuid4())
        return cls(device, version, boot, f"edge-{device}-{digest[:12]}")


def boot_id(root: Path = Path("/")) -> str:
    """Return what tells one start of the kernel from another; empty where it does not say."""
    return _first_line(root / "proc/sys/kernel/random/boot_id")


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
