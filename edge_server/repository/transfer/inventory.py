"""The inventory of a model in a repository: its files by content."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.process.utf8 import shown
from edge_server.repository.content import Content, content_of
from edge_server.repository.manifest import NAME, SIGNATURE_NAME, read_about
from edge_server.repository.scan import is_model_name
from edge_server.repository.tree import is_left_behind, look

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.repository.tree import ModelTree


@dataclass(frozen=True)
class Inventory:
    """The complete inventory of one model of a repository.

    Attributes:
        name: the model.
        content: its files and empty directories, the manifest and its signature included.
        manifest: the exact bytes of the manifest; None if there is none.
        signature: the exact bytes of the signature; None if there is none.
        has_previous: True if the repository holds a previous model for `rollback`.
        fault: the reason why the model is unusable or cannot be read; the other fields but
            `has_previous` are then empty.
    """

    name: str
    content: Content = field(default_factory=Content)
    manifest: bytes | None = None
    signature: bytes | None = None
    has_previous: bool = False
    fault: str = ""

    @property
    def versions(self) -> list[int]:
        """The version numbers, ascending."""
        paths = (*(path for path in self.content.files if "/" in path), *self.content.empty)
        first = {path.partition("/")[0] for path in paths}
        return sorted(int(each) for each in first if each.isdecimal() and each[0] != "0")


def take_inventory(repository: Path, name: str) -> Inventory:
    """Read all files of model `name`; a read error becomes the inventory's fault.

    Raises:
        ModelConfigError: the repository itself cannot be read.
    """
    tree = look_at(repository, name)
    has_previous = (repository / previous(name)).is_dir()
    if tree.fault:
        return Inventory(name, has_previous=has_previous, fault=tree.fault)
    try:
        content = content_of(tree)
        manifest, signature = (read_about(tree, path) for path in (NAME, SIGNATURE_NAME))
    except ModelConfigError as error:
        return Inventory(name, has_previous=has_previous, fault=str(error))
    return Inventory(name, content, manifest, signature, has_previous)


def model_names(repository: Path) -> list[str]:
    """Return the names of the models, sorted, including unusable ones; `take_inventory` reports
    their faults.

    Raises:
        ModelConfigError: the repository cannot be read.
    """
    try:
        return sorted(
            shown(entry.name)
            for entry in repository.iterdir()
            if not (is_left_behind(entry.name) or entry.name.startswith("_"))
            and (entry.is_dir() or entry.is_symlink())
        )
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}"
        ) from error


def usable_tree(repository: Path, name: str) -> ModelTree:
    """Scan model `name`.

    Raises:
        ModelConfigError: the model does not exist or is unusable.
    """
    if not is_model_name(name) or not os.path.lexists(repository / name):
        raise ModelConfigError(f"{repository}: there is no model '{name}'")
    tree = look_at(repository, name)
    tree.require_usable()
    return tree


def look_at(repository: Path, name: str) -> ModelTree:
    """Scan model `name` of `repository`.

    Raises:
        ModelConfigError: the repository itself cannot be read.
    """
    try:
        return look(repository, name)
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be read: {error.strerror}; it must be a "
            "directory that is there and that this user may read"
        ) from error


def previous(name: str) -> str:
    """Return the directory name of a model's previous content."""
    return f".previous-{name}"
