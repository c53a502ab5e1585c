"""What a board is, by its files: a Jetson, a desktop, a container."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from edge_server.board.device_nodes import (
    Account,
    DeviceNode,
    find_account,
    read_cameras,
    read_gpu_nodes,
    this_account,
)
from edge_server.board.facts import BoardFacts, read_within
from edge_server.board.jetson import (
    JetPack,
    L4tRelease,
    OrinModule,
    chip_of,
    jetpack_of,
    module_of,
    read_l4t,
)
from edge_server.board.resources import (
    GroupLimits,
    is_directory,
    is_there,
    listed,
    read_group_limits,
    read_text,
)
from edge_server.board.watch import WallClock, read_wall_clock

# /proc/device-tree is a link to the second path, and leaves a root that is not the system's own.
_DEVICE_TREES = ("proc/device-tree", "sys/firmware/devicetree/base")
_NVDLA_COMPILERS = (
    "usr/lib/aarch64-linux-gnu/nvidia",
    "usr/lib/aarch64-linux-gnu/tegra",
    "usr/lib/aarch64-linux-gnu",
)
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
        nvdla_compiler: path of libnvdla_compiler.so.
        facts: how it runs now; None where a file of its sensors cannot be read.
        argus: the daemon of CSI cameras has its socket in /tmp.
    """

    account: Account
    model: str | None
    chip: str | None
    module: OrinModule | None
    l4t: L4tRelease | None
    jetpack: JetPack | None
    kernel: str | None
    cuda: str | None
    nvdla_compiler: str | None
    facts: BoardFacts | None
    limits: GroupLimits
    gpu_nodes: tuple[DeviceNode, ...]
    cameras: tuple[DeviceNode, ...]
    argus: bool
    wall_clock: WallClock
    systemd: bool
    unit: UnitFile | None

    @property
    def is_jetson(self) -> bool:
        return _is_jetson(self.chip, self.l4t)


def read_board(root: Path = Path("/"), now_s: float | None = None) -> Board:
    """Read the board whose system is below `root`; run no program, and never raise for a missing
    file.

    Rights are those of the user of the daemon's unit if that is installed, otherwise of this
    process.
    """
    unit = _find_unit_file(root)
    account = None if unit is None else find_account(root, unit.user or "root")
    account = account or this_account(root)
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
        nvdla_compiler=_nvdla_compiler(root),
        facts=read_within(_SENSORS_S, root),
        limits=read_group_limits(root),
        gpu_nodes=read_gpu_nodes(root, account, jetson=_is_jetson(chip, l4t)),
        cameras=read_cameras(root, account),
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


def _is_jetson(chip: str | None, l4t: L4tRelease | None) -> bool:
    return chip is not None or l4t is not None


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


def _nvdla_compiler(root: Path) -> str | None:
    for directory in _NVDLA_COMPILERS:
        for path in listed(root / directory, "libnvdla_compiler.so*"):
            return f"/{path.relative_to(root)}"
    return None
