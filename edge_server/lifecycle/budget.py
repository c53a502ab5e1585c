"""The memory budget: checks before a load that there is enough memory for the model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import Unavailable
from edge_server.lifecycle.memory import available_bytes
from edge_server.model_config.files import reading

if TYPE_CHECKING:
    from collections.abc import Collection

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
}
_OTHERS = _Cost(1.0)


class MemoryBudget:
    """Refuses a load for which the board lacks memory, before the kernel kills a running process.

    Args:
        reserve_bytes: the memory that must stay free.
        root: the root of the file system with /proc and /sys; see `available_bytes`.
    """

    def __init__(self, reserve_bytes: int = DEFAULT_RESERVE_BYTES, root: Path = Path("/")) -> None:
        self._reserve_bytes = reserve_bytes
        self._root = root
        self._lock = threading.Lock()
        self._lacked: dict[str, int] = {}

    def check(self, model_spec: ModelSpec, versions: Collection[int]) -> None:
        """Check that there is enough memory to load `versions` of `model_spec` now.

        Raises:
            Unavailable: there is too little memory; the text names the need and the remedy.
            ModelConfigError: the model's files cannot be read.
        """
        needed = needed_bytes(model_spec, versions)
        reason = self._shortage(needed)
        with self._lock:
            self._lacked[model_spec.name] = needed if reason else 0
        if reason:
            raise Unavailable(f"model '{model_spec.name}': {reason}")

    def lacked(self, name: str) -> int:
        """Return the bytes that the last load of `name` needed if it was refused, otherwise 0."""
        with self._lock:
            return self._lacked.get(name, 0)

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
