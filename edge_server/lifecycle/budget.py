"""The memory budget: checks before a load that there is enough memory for the model.

The available memory is the minimum of the board's and of the limits of this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.board.kernel_files import read_number, read_text
from edge_server.board.resources import control_groups, read_memory
from edge_server.errors import Unavailable
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.model_config.config import ModelConfig

_MIB = 1 << 20
DEFAULT_RESERVE_BYTES = 256 * _MIB


class _Cost(NamedTuple):
    """The cost of a load: bytes per byte of weights, plus a constant, once or per instance."""

    factor: float
    beside_bytes: int = 0
    each_instance: bool = False


# Costs at the peak of a load. ONNX Runtime: 2.3 measured at 103 MiB of weights, for the file while
# it is read and the session. TensorRT: the plan, the engine made from it (in the same memory on a
# Jetson) and the contexts. Python: a process with numpy, and the weights, which most frameworks
# hold twice while they read them.
_COSTS = {
    "onnxruntime": _Cost(2.5),
    "tensorrt": _Cost(2.5),
    "python": _Cost(2.0, 64 * _MIB, each_instance=True),
    "openvino": _Cost(2.0, 160 * _MIB, each_instance=True),
    "pytorch": _Cost(2.0, 320 * _MIB, each_instance=True),
    "paddle": _Cost(2.0, 320 * _MIB, each_instance=True),
    "tensorflow": _Cost(2.0, 640 * _MIB, each_instance=True),
}
_OTHERS = _Cost(1.0)


class TooLittleMemory(Unavailable):
    """A load was refused; `needed_bytes` must be available before the next one."""

    def __init__(self, text: str, needed_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


class MemoryBudget:
    """Refuses a load for which the board lacks memory, before the kernel kills a running process.

    Args:
        reserve_bytes: the memory that must stay free.
        root: the root of the file system with /proc and /sys; see `available_bytes`.
    """

    def __init__(self, reserve_bytes: int = DEFAULT_RESERVE_BYTES, root: Path = Path("/")) -> None:
        self._reserve_bytes = reserve_bytes
        self._root = root

    def check(self, model_spec: ModelSpec, versions: Collection[int]) -> None:
        """Check that there is enough memory to load `versions` of `model_spec` now.

        Raises:
            TooLittleMemory: the text names the need and the remedy.
            ModelConfigError: the model's files cannot be read.
        """
        needed = needed_bytes(model_spec, versions)
        if reason := self._shortage(needed):
            raise TooLittleMemory(f"model '{model_spec.name}': {reason}", needed)

    def has(self, needed_bytes: int) -> bool:
        """Return whether `needed_bytes` are available at this moment."""
        return not self._shortage(needed_bytes)

    def _shortage(self, needed_bytes: int) -> str:
        available = available_bytes(self._root)
        return "" if available is None else shortage(needed_bytes, available, self._reserve_bytes)


def shortage(needed_bytes: int, available_bytes: int, reserve_bytes: int) -> str:
    """Return the reason to refuse a load of `needed_bytes`, or "" if there is enough memory."""
    if needed_bytes <= max(0, available_bytes - reserve_bytes):
        return ""
    needed, available, reserve = (
        f"{count / _MIB:.0f} MiB" for count in (needed_bytes, available_bytes, reserve_bytes)
    )
    return (
        f"too little memory: loading it needs about {needed}, {available} are available and "
        f"{reserve} of them stay in reserve; unload another model, load fewer instances, or "
        "raise the daemon's limit where it has one (systemd: MemoryMax=)"
    )


def needed_bytes(model_spec: ModelSpec, versions: Collection[int]) -> int:
    """Estimate the additional memory for a load of these versions, in bytes.

    Raises:
        ModelConfigError: a file cannot be read.
    """
    cost = _COSTS.get(model_spec.config.backend, _OTHERS)
    instances = sum(group.count for group in model_spec.config.instance_groups)
    total = 0
    for version in versions:
        weights = _weights_bytes(model_spec.files.versions[version], model_spec.config)
        each = int(weights * cost.factor) + cost.beside_bytes
        total += each * (instances if cost.each_instance else 1)
    return total


def _weights_bytes(directory: Path, config: ModelConfig) -> int:
    """Return the size of the largest file, or of all files if the model itself is a directory."""
    with reading(directory):
        model = directory / config.default_model_filename
        if config.default_model_filename and model.is_dir():
            return sum(_sizes(model))
        return max(_sizes(directory), default=0)


def _sizes(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.rglob("*") if path.is_file()]


class _Names(NamedTuple):
    """The relevant files of a control group, and the mount point of such groups."""

    mount: str
    limits: tuple[str, ...]
    usage: str
    cache: str


# Beyond memory.high a group is slowed down until it uses less.
_V2 = _Names("", ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Names("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the available memory in bytes; None if the system reports neither of its sources.

    The result is the minimum of the memory that the kernel can allocate without swapping and of the
    remainder in each control group of this process and its parents.

    Args:
        root: the root of the file system with /proc and /sys.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    board_bytes = read_memory(root).available_bytes
    if board_bytes is not None:
        yield board_bytes
    for controllers, group in control_groups(root):
        names = _V1 if "memory" in controllers.split(",") else None if controllers else _V2
        if names is not None:
            yield from _left(root / "sys/fs/cgroup" / names.mount / group, names)


def _left(group: Path, names: _Names) -> Iterator[int]:
    used = read_number(group / names.usage)
    # `max` means no limit and does not parse as a number.
    limits = [n for name in names.limits if (n := read_number(group / name)) is not None]
    if used is None or not limits:
        return
    for line in (read_text(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == names.cache and value.isdecimal():
            # Page cache of inactive files; the kernel drops it first at the limit of a group.
            used -= int(value)
    yield max(0, min(limits) - max(0, used))
