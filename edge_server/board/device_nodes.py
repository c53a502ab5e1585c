"""The device files of GPU, NVDLA and cameras, and who may open them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.board.account import group_that_may
from edge_server.board.kernel_files import is_directory, listed, read_text

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.board.account import Account

# Names differ between JetPack 5, 6 and 7, and between modules: what is there is looked at.
_JETSON = ("nvmap", "nvhost-*", "nvgpu/*", "nvgpu/*/*", "dri/renderD*")
# Elsewhere a render node may belong to another maker's GPU.
_DESKTOP = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")


@dataclass(frozen=True)
class DeviceNode:
    """One file below /dev.

    Attributes:
        usable: the account that was asked for may read and write it.
        group: that the account would have to join for it; None where no group helps.
        for_root: nobody else may even read it.
        label: what it is called by its driver; cameras have one.
    """

    path: str
    usable: bool
    group: str | None
    label: str = ""
    for_root: bool = False

    @property
    def is_csi(self) -> bool:
        """Whether it is a camera on the board's own connector, which Argus reads."""
        return self.label.startswith("vi-output")


def read_gpu_nodes(root: Path, account: Account, *, jetson: bool) -> tuple[DeviceNode, ...]:
    """Those of NVIDIA's GPU, of NVDLA and codecs below `root`, as `account` finds them."""
    patterns = _JETSON if jetson else _DESKTOP
    paths = [path for pattern in patterns for path in listed(root / "dev", pattern)]
    return tuple(_node(root, path, account) for path in paths if not is_directory(path))


def read_cameras(root: Path, account: Account) -> tuple[DeviceNode, ...]:
    """/dev/video* below `root`, as `account` finds them."""
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
