"""Builds loaded, validated models from a spec, outside the registry, within the memory budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import find_backend
from edge_server.backends.contract import (
    STANDALONE,
    LoadContext,
    NoRoom,
    Prepares,
    interrupt,
    no_progress,
)
from edge_server.board.resources import control_groups, read_memory, read_number, read_text
from edge_server.errors import ModelLoadError
from edge_server.gpu.device import Devices
from edge_server.inference.scheduling import RUN_TIMEOUT_S, Scheduling
from edge_server.lifecycle.model_spec import LoadedVersions, LoadFailure
from edge_server.lifecycle.model_validation import validate
from edge_server.model_config.files import CONFIG_NAME, CONFIGS_DIRECTORY, reading
from edge_server.model_config.parse import FRAMEWORK_BACKENDS, PROCESS_BACKENDS
from edge_server.process.threads import GivenUp, Hangs, run_with_timeout
from edge_server.repository.manifest import NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from edge_server.backends.contract import ProgressCallback, ServerContext
    from edge_server.inference.registry import LoadedModel
    from edge_server.lifecycle.model_spec import ModelSpec, Part
    from edge_server.model_config.config import ModelConfig

_MIB = 1 << 20
DEFAULT_RESERVE_BYTES = 256 * _MIB
# Compared by their meaning, or redundant to the other files.
_NOT_COMPARED = frozenset({CONFIG_NAME, NAME, SIGNATURE_NAME})


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


class MemoryBudget:
    """Refuses a load for which the board lacks memory, before the kernel kills a running process;
    `reserve_bytes` must stay free."""

    def __init__(self, reserve_bytes: int = DEFAULT_RESERVE_BYTES, root: Path = Path("/")) -> None:
        self._reserve_bytes = reserve_bytes
        self._root = root

    def check(
        self,
        model_spec: ModelSpec,
        versions: Collection[int],
        grown: Collection[int] = (),
        running: int = 0,
    ) -> None:
        """Raises NoRoom where there is not enough for what `needed_bytes` counts."""
        needed = needed_bytes(model_spec, versions, grown, running)
        if reason := self._shortage(needed):
            raise NoRoom(f"model '{model_spec.name}': {reason}", lambda: not self._shortage(needed))

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


def _instances(model_spec: ModelSpec) -> int:
    return sum(group.count for group in model_spec.config.instance_groups)


def needed_bytes(
    model_spec: ModelSpec, versions: Collection[int], grown: Collection[int] = (), running: int = 0
) -> int:
    """Estimate the additional memory, in bytes, for a load of `versions`, and for the instances of
    the loaded versions `grown`, of which `running` are there."""
    cost = _COSTS.get(model_spec.config.backend, _OTHERS)
    instances = _instances(model_spec)
    total = 0
    for version in (*versions, *grown):
        weights = _weights_bytes(model_spec.files.versions[version], model_spec.config)
        each = int(weights * cost.factor) + cost.beside_bytes
        count = max(0, instances - running) if version in grown else instances
        total += each * (count if cost.each_instance else version not in grown)
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


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the available memory in bytes; None if the system reports neither of its sources. The
    result is the minimum of the memory that the kernel can allocate without swapping and of the
    remainder in each control group of this process and its parents."""
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    board_bytes = read_memory(root).available_bytes
    if board_bytes is not None:
        yield board_bytes
    for group in control_groups(root):
        used = read_number(group / "memory.current")
        # `max` means no limit and does not parse as a number; beyond memory.high a group is slowed
        # down until it uses less.
        read = (read_number(group / name) for name in ("memory.max", "memory.high"))
        limits = [number for number in read if number is not None]
        if used is None or not limits:
            continue
        for line in (read_text(group / "memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file" and value.isdecimal():
                # Page cache of inactive files; the kernel drops it first at the limit of a group.
                used -= int(value)
        yield max(0, min(limits) - max(0, used))


class Reuse(IntEnum):
    """The parts of a version that are reused; each value includes the values before it."""

    NOTHING = 0
    MODEL = 1
    INSTANCES = 2


@dataclass(frozen=True, eq=False)
class ModelLoad:
    """A load of a model, outside the registry.

    Attributes:
        serving: the serving versions; their unchanged parts are reused, see `Reuse`.
        progress, builds: see `LoadContext`."""

    model_spec: ModelSpec
    serving: LoadedVersions | None = None
    progress: ProgressCallback = no_progress
    builds: bool = True


class Build:
    """Loads and validates models with their backends.

    Args:
        budget: checked before a model is loaded; None checks nothing.
        timeout_s: for one request of a model's validation. A model that hangs is refused, and its
            run is ended where its backend can do that. Otherwise it is left open: its thread cannot
            be ended, and the resources that it uses must not be closed."""

    def __init__(
        self,
        scheduling: Scheduling | None = None,
        budget: MemoryBudget | None = None,
        devices: Devices | None = None,
        server_context: ServerContext = STANDALONE,
        *,
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> None:
        self._scheduling = scheduling or Scheduling()
        self.budget = budget
        self._devices = devices or Devices()
        self._server_context = server_context
        self._timeout_s = timeout_s

    def model(self, load: ModelLoad) -> LoadedVersions | LoadFailure:
        """Load every version that the spec selects, or return the failure and keep none open. Any
        exception of a backend becomes a failure of this model only."""
        began = time.monotonic()
        model_spec, serving = load.model_spec, load.serving
        reusable = {version: _reuse(load, version) for version in model_spec.versions}
        made: list[LoadedModel] = []
        kept: set[int] = set()
        version = 0
        # A backend may raise anything, and a model may call sys.exit().
        try:
            if self.budget is not None:
                new = [v for v, (what, _) in reusable.items() if what < Reuse.MODEL]
                grown = [v for v, (what, _) in reusable.items() if what is Reuse.MODEL]
                running = 0 if serving is None else _instances(serving.model_spec)
                self.budget.check(model_spec, new, grown, running)
            for version, (what, like) in reusable.items():
                loaded = None if like is None else self._reused(model_spec, what, like)
                if loaded is not None:
                    kept.add(version)
                made.append(loaded or self._anew(load, version))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            LoadedVersions(model_spec, tuple(made)).close()
            return LoadFailure.of(error, model_spec.name, version, model_spec)
        return LoadedVersions(model_spec, tuple(made), time.monotonic() - began, frozenset(kept))

    def prepare(self, load: ModelLoad) -> None:
        """Build what the load lacks, which takes minutes; see `Prepares`."""
        backend = find_backend(load.model_spec.config.backend)
        if isinstance(backend, Prepares):
            for version in load.model_spec.versions:
                backend.prepare(self._context(load, version))

    def ensemble(self, part: Part) -> LoadedVersions:
        models = [self._scheduling.ensemble(c, version) for version, c in part.configs.items()]
        return LoadedVersions(part.model_spec, tuple(models))

    def _reused(self, model_spec: ModelSpec, what: Reuse, like: LoadedModel) -> LoadedModel | None:
        """Return the version `like` with its parts `what`; None if it has been closed."""
        config = _renewed(like.config, model_spec)
        if what is Reuse.INSTANCES:
            return like.shared(config)
        return self._scheduling.with_instances(like, config, model_spec.files.directory)

    def _anew(self, load: ModelLoad, version: int) -> LoadedModel:
        """Load and validate the version; the validation does not count in its statistics."""
        began = time.monotonic()
        model_spec = load.model_spec
        files, context = model_spec.files, self._context(load, version)
        model = find_backend(model_spec.config.backend).load(context)
        try:
            loaded = self._scheduling.model(context.config, version, model, files.directory)
        except BaseException:
            model.close()
            raise
        loaded = replace(loaded, load_s=time.monotonic() - began, holds=[files.holder])
        try:
            run_with_timeout(
                f"validate-{model_spec.name}",
                partial(validate, loaded, files.directory),
                self._timeout_s,
                late=loaded.close,
            )
        except Hangs as error:
            interrupt(loaded.model)
            raise ModelLoadError(
                f"model '{model_spec.name}': its check before it serves: {error}; fix the model, "
                "or record a golden pair that it responds to"
            ) from error
        except GivenUp:
            interrupt(loaded.model)
            raise  # closed as soon as its validation ends
        except BaseException:
            loaded.close()
            raise
        loaded.statistics.start_over()
        return loaded

    def _context(self, load: ModelLoad, version: int) -> LoadContext:
        files, config = load.model_spec.files, load.model_spec.config
        completed = find_backend(config.backend).complete(files, version, config)
        return LoadContext(
            files.versions[version],
            replace(completed, labels=config.labels),
            self._devices,
            load.progress,
            self._server_context,
            builds=load.builds,
        )


def _reuse(load: ModelLoad, version: int) -> tuple[Reuse, LoadedModel | None]:
    """Return the reusable part of the version and its serving model, or NOTHING and None. A part is
    reusable only if the files are unchanged and the configurations differ in nothing but the
    version policy and the instance groups."""
    new, serving = load.model_spec, load.serving
    nothing = Reuse.NOTHING, None
    if serving is None or serving.idle:
        return nothing
    old = serving.model_spec
    like = next((model for model in serving.models if model.version == version), None)
    if like is None or old.is_ensemble or new.is_ensemble or not _same_files(new, old, version):
        return nothing
    ours, theirs = pb.ModelConfig(), pb.ModelConfig()
    for message, spec in ((ours, new), (theirs, old)):
        message.CopyFrom(spec.message)
        message.ClearField("version_policy")
    if ours == theirs:
        return Reuse.INSTANCES, like
    placements = [_placements(message) for message in (ours, theirs)]
    for message in (ours, theirs):
        message.ClearField("instance_group")
    is_elsewhere = placements[0] != placements[1]
    # A framework's threads depend on the number of instances; a sequence has its state in one.
    is_bound = new.config.backend in FRAMEWORK_BACKENDS or (
        new.config.backend in PROCESS_BACKENDS and new.config.sequence_batching is not None
    )
    return nothing if ours != theirs or is_elsewhere or is_bound else (Reuse.MODEL, like)


def _renewed(config: ModelConfig, model_spec: ModelSpec) -> ModelConfig:
    """Return the configuration of a reused version with version policy and instance groups of
    `model_spec`."""
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    for field in ("version_policy", "instance_group"):
        message.ClearField(field)
    message.version_policy.CopyFrom(model_spec.message.version_policy)
    message.instance_group.extend(model_spec.message.instance_group)
    return replace(config, message=message, instance_groups=model_spec.config.instance_groups)


def _placements(message: Any) -> set[Any]:
    """Return the devices of the instances; on another device the model must be loaded again."""
    return {
        (
            group.kind,
            tuple(group.gpus),
            tuple((d.kind, d.device_id) for d in group.secondary_devices),
        )
        for group in message.instance_group
    }


def _same_files(new: ModelSpec, old: ModelSpec, version: int) -> bool:
    def counts(path: str) -> bool:
        first = path.partition("/")[0]
        compared = not (first.isdecimal() or first == CONFIGS_DIRECTORY or path in _NOT_COMPARED)
        return first == str(version) or compared

    if new.fingerprint is None or old.fingerprint is None:
        return False
    ours, theirs = (
        {file for file in fingerprint if counts(file[0])}
        for fingerprint in (new.fingerprint, old.fingerprint)
    )
    # A size of -1 marks an unreadable file, which never counts as unchanged.
    return ours == theirs and all(size >= 0 for _, size, *_ in ours)
