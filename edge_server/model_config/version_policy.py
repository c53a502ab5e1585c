"""The version policy: selects the versions on disk to load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from edge_server.model_config.files import ModelFiles

log = logging.getLogger(__name__)

_TOLD = 8


def select_versions(message: Any, files: ModelFiles) -> tuple[int, ...]:
    """Return the versions that a completed configuration's policy selects, ascending.

    Raises:
        ModelConfigError: none of them is on disk.
    """
    available = sorted(files.versions)
    policy = message.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "specific":
        wanted = sorted(set(policy.specific.versions))
        selected = [version for version in wanted if version in files.versions]
        if missing := sorted(set(wanted) - set(selected)):
            log.error(
                "model %s: version %s is specified but not on disk%s",
                files.name,
                ", ".join(map(str, missing[:_TOLD])),
                f", nor are {len(missing) - _TOLD} others" if len(missing) > _TOLD else "",
            )
    elif choice == "all":
        selected = available
    else:
        selected = available[-max(policy.latest.num_versions, 1) :]
    if not selected:
        raise ModelConfigError(
            f"{files.directory}: at least one version must be available under the version policy "
            f"of model '{files.name}'; make a directory '1' with the model's file in it"
        )
    return tuple(selected)
