"""The device files of GPU, NVDLA and cameras, and their access rights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.account import group_that_may
from edge_server.board.kernel_files import is_directory, listed, read_text

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.board.account import Account

# Names differ between JetPack 6 and 7, and between modules, so the existing files are listed.
_JETSON = ("nvmap", "nvhost-*", "nvgpu/*", "nvgpu/*/*", "dri/renderD*")
# On a desktop a render node may belong to another vendor's GPU.
_DESKTOP = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")


@dataclass(frozen=True)
class DeviceNode:
    """One file below /dev.

    Attributes:
        usable: the given account may read and write the file.
        group: the group that grants the account access; None where no group does.
        for_root: only root may read the file.
        label: the driver's name for the device; cameras have one.
    """

    path: str
    usable: bool
    group: str | None
    label: str = ""
    for_root: bool = False

    @property
    def is_csi(self) -> bool:
        """Return whether the file is a camera on the board's CSI connector, which Argus reads."""
        return self.label.startswith("vi-output")


def read_gpu_nodes(root: Path, account: Account, *, jetson: bool) -> tuple[DeviceNode, ...]:
    """List the files of NVIDIA's GPU, of NVDLA and codecs below `root`, with the rights of
    `account`."""
    patterns = _JETSON if jetson else _DESKTOP
    paths = [path for pattern in patterns for path in listed(root / "dev", pattern)]
    return tuple(_node(root, path, account) for path in paths if not is_directory(path))


def read_cameras(root: Path, account: Account) -> tuple[DeviceNode, ...]:
    """List /dev/video* below `root`, with the rights of `account`."""
    names = root / "sys/class/video4linux"
    return tuple(
        _node(root, path, account, read_text(names / path.name / "name") or "")
        for path in listed(root / "dev", "video[0-9]*")
    )


def _node(root: Path, path: Path, account: Account, label: str = "") -> DeviceNode:
    name = f"/{path.relative_to(root)}"
    usable, group = account.may_use(path), group_that_may(root, path)
    joined = group is not None and group.gid in account.gids
    return DeviceNode(
        name, usable, None if group is None or joined else group.name, label, group is None
    )
