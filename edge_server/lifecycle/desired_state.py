"""The desired state: the serving and the coming spec of each model, and its users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from edge_server.lifecycle.model_spec import ModelSpec


@dataclass(frozen=True)
class DesiredModel:
    """The desired state of one model.

    Attributes:
        explicit: True if the model was requested by name, not only as a member of an ensemble.
        serving: the spec of the READY versions.
        coming: the spec that is loading or, for an ensemble, waits for its members.
    """

    explicit: bool = False
    serving: ModelSpec | None = None
    coming: ModelSpec | None = None

    def uses(self, name: str) -> bool:
        return any(d is not None and name in d.members for d in (self.serving, self.coming))


class DesiredState:
    """The desired models by name. Not thread-safe: the caller locks."""

    def __init__(self) -> None:
        self._by_name: dict[str, DesiredModel] = {}

    def __getitem__(self, name: str) -> DesiredModel:
        """Return the desired model of `name`; an empty one for a model that is not desired."""
        return self._by_name.get(name, DesiredModel())

    def __setitem__(self, name: str, wish: DesiredModel) -> None:
        self._by_name[name] = wish

    def serving(self) -> dict[str, ModelSpec]:
        return {n: w.serving for n, w in self._by_name.items() if w.serving is not None}

    def waiting(self, loaded: Collection[str]) -> list[ModelSpec]:
        """Return the coming ensembles none of whose members, direct or indirect, is still loading;
        the models in `loaded` count as loaded."""
        return [
            wish.coming
            for wish in self._by_name.values()
            if wish.coming is not None
            and wish.coming.is_ensemble
            and not any(self._is_loading(m) for m in self.below(wish.coming) if m not in loaded)
        ]

    def below(self, model_spec: ModelSpec) -> list[str]:
        """Return the members of `model_spec`, direct and indirect."""
        found = sorted(model_spec.members)
        for name in found:  # grows while it is walked
            wish = self[name]
            members = {m for d in (wish.serving, wish.coming) if d is not None for m in d.members}
            found += sorted(members.difference(found))
        return found

    def wait(self, ensemble: ModelSpec) -> None:
        """Let `ensemble` wait for members that fit; its serving versions continue to serve."""
        wish = self[ensemble.name]
        self._by_name[ensemble.name] = replace(wish, coming=wish.coming or ensemble)

    def forget(self, name: str, *, with_members: bool) -> list[str]:
        """Remove `name` from the desired state.

        Args:
            name: the model to remove.
            with_members: also remove the members that were not requested by name and that no
                other ensemble uses.

        Returns:
            The removed models, `name` first.
        """
        forgotten = [name]
        for each in forgotten:  # grows while it is walked
            wish = self._by_name.pop(each, DesiredModel())
            model_spec = wish.serving or wish.coming
            if with_members and model_spec is not None:
                forgotten += sorted(m for m in model_spec.members if self._is_left_over(m))
        return forgotten

    def suspend_users(self, names: Collection[str]) -> list[str]:
        """Let the ensembles that use one of `names`, directly or indirectly, wait; return them."""
        suspended: list[str] = []
        for used in (todo := list(names)):  # grows while it is walked
            for name, wish in self._by_name.items():
                if wish.serving is not None and used in wish.serving.members:
                    suspended.append(name)
                    todo.append(name)
                    coming = wish.coming or wish.serving
                    self._by_name[name] = replace(wish, serving=None, coming=coming)
        return suspended

    def _is_loading(self, name: str) -> bool:
        coming = self[name].coming
        return coming is not None and not coming.is_ensemble

    def _is_left_over(self, name: str) -> bool:
        wish = self._by_name.get(name)
        return (
            wish is not None
            and not wish.explicit
            and not any(other.uses(name) for other in self._by_name.values())
        )
