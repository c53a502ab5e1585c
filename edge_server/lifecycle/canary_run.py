"""One canary: the new versions of a model, and the predecessor that is kept open for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.lifecycle.model_spec import LoadedVersions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.canary_monitor import CanaryMonitor
    from edge_server.inference.snapshot import LoadedModel
    from edge_server.lifecycle.model_spec import ModelSpec


@dataclass(frozen=True, eq=False)
class KeptPredecessor:
    """The predecessor of a version in a canary.

    Attributes:
        built: the predecessor's versions, open; the caller that takes them publishes or closes
            them.
        ensembles: the specs of the ensembles that changed together with the model.
        members: for an ensemble, the models that it used, direct and indirect; open, for the
            comparison, and closed by the caller that takes them.
    """

    built: LoadedVersions
    ensembles: Mapping[str, ModelSpec]
    members: tuple[LoadedModel, ...] = ()

    def close(self) -> None:
        """Close the predecessor and its members; used when the predecessor is discarded."""
        self.built.close()
        self.close_members()

    def close_members(self) -> None:
        """Close only the members; used when `built` is published again."""
        LoadedVersions(self.built.model_spec, self.members).close()


class CanaryRun:
    """The canary of one model's new versions.

    Attributes:
        model_spec: the spec of the new versions.
        before: the predecessor; None once another owner has taken it.
        versions: the numbers of the new versions.
        monitor: compares both; set right after construction.
    """

    monitor: CanaryMonitor

    def __init__(
        self, model_spec: ModelSpec, before: KeptPredecessor, versions: frozenset[int]
    ) -> None:
        self.model_spec = model_spec
        self.before: KeptPredecessor | None = before
        self.versions = versions

    def take(self) -> KeptPredecessor | None:
        """Return the predecessor and pass its ownership to the caller."""
        before, self.before = self.before, None
        return before
