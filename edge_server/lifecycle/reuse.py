"""Decides which parts of a serving model can be reused for its new spec."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.model_config.files import CONFIG_NAME
from edge_server.repository.manifest import NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from edge_server.lifecycle.model_spec import ModelSpec
    from edge_server.model_config.config import ModelConfig
    from edge_server.repository.tree import Fingerprint

# A model of these backends consists of its instances only, each with its whole configuration.
_ONLY_INSTANCES = frozenset({"python"})
# Compared by their meaning, or redundant to the other files.
_NOT_COMPARED = frozenset({CONFIG_NAME, NAME, SIGNATURE_NAME})


class Reuse(IntEnum):
    """The parts of a version that are reused; each value includes the values before it."""

    NOTHING = 0
    STATISTICS = 1
    MODEL = 2
    INSTANCES = 3


def reuse(new: ModelSpec, old: ModelSpec, version: int) -> Reuse:
    """Return which parts of `version`, loaded from `old`, can be reused for `new`.

    A part is reusable only if the files are unchanged and the configurations differ in nothing but
    the version policy and the instance groups.
    """
    if new.is_ensemble or old.is_ensemble or not _same_files(new, old, version):
        return Reuse.NOTHING
    ours, theirs = _without(new, "version_policy"), _without(old, "version_policy")
    if ours == theirs:
        return Reuse.INSTANCES
    placements = [_placements(message) for message in (ours, theirs)]
    for message in (ours, theirs):
        message.ClearField("instance_group")
    if ours != theirs:
        return Reuse.NOTHING
    if placements[0] != placements[1] or new.config.backend in _ONLY_INSTANCES:
        return Reuse.STATISTICS
    return Reuse.MODEL


def renewed(config: ModelConfig, model_spec: ModelSpec) -> ModelConfig:
    """Return the configuration of a reused version with version policy and instance groups of
    `model_spec`."""
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    for field in ("version_policy", "instance_group"):
        message.ClearField(field)
    message.version_policy.CopyFrom(model_spec.message.version_policy)
    message.instance_group.extend(model_spec.message.instance_group)
    return replace(config, message=message, instance_groups=model_spec.config.instance_groups)


def _without(model_spec: ModelSpec, field: str) -> Any:
    message = pb.ModelConfig()
    message.CopyFrom(model_spec.message)
    message.ClearField(field)
    return message


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
    if new.fingerprint is None or old.fingerprint is None:
        return False
    ours = _files_for(new.fingerprint, version)
    # A size of -1 marks an unreadable file, which never counts as unchanged.
    return ours == _files_for(old.fingerprint, version) and all(size >= 0 for _, size, *_ in ours)


def _files_for(fingerprint: Fingerprint, version: int) -> Fingerprint:
    """Return the files of the version and the files that belong to all versions."""
    return frozenset(file for file in fingerprint if _counts(file[0], version))


def _counts(path: str, version: int) -> bool:
    first = path.partition("/")[0]
    return first == str(version) or not (first.isdecimal() or path in _NOT_COMPARED)
