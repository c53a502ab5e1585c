"""A repository on this machine, as the source or target of a transfer.

The remote agent runs this module, too, so it uses only the standard library (see
`remote_agent.py`).
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError, NotFound
from edge_server.repository.scan import is_model_name, shown
from edge_server.repository.transfer.incoming import Incoming, roll_back
from edge_server.repository.transfer.inventory import (
    ABOUT_CONTENT,
    digest_of,
    look_at,
    source_of,
    take_inventory,
)
from edge_server.repository.transfer.verdict import followed, models_told, wait_for
from edge_server.repository.tree import is_left_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge_server.repository.transfer.inventory import FileContent, Inventory, Sink
    from edge_server.repository.transfer.verdict import Wanted
    from edge_server.repository.tree import ModelTree
    from edge_server.repository.verdicts import Verdict


class LocalRepository:
    """A repository in a directory of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the names of the models, sorted, including unusable ones; `inventory` reports
        their faults.

        Raises:
            ModelConfigError: the repository cannot be read.
        """
        try:
            return sorted(
                shown(entry.name)
                for entry in self.path.iterdir()
                if not (is_left_behind(entry.name) or entry.name.startswith("_"))
                and (entry.is_dir() or entry.is_symlink())
            )
        except OSError as error:
            raise ModelConfigError(
                f"{self.path}: the model repository cannot be read: {error.strerror}"
            ) from error

    def inventory(self, name: str) -> Inventory:
        """Read all files of model `name` and return their inventory.

        Raises:
            ModelConfigError: the repository cannot be read.
        """
        return take_inventory(self.path, name)

    def tree(self, name: str) -> ModelTree:
        """Scan model `name`.

        Raises:
            ModelConfigError: the model does not exist or is unusable.
        """
        if not is_model_name(name) or not os.path.lexists(self.path / name):
            raise ModelConfigError(f"{self.path}: there is no model '{name}'")
        tree = look_at(self.path, name)
        if tree.fault:
            raise ModelConfigError(tree.fault)
        return tree

    @contextmanager
    def receiving(self, name: str, all_but: str = "") -> Iterator[Incoming]:
        """Yield an `Incoming` for model `name`; the repository changes only when it is placed.

        Args:
            name: the model.
            all_but: if given, the existing model is copied except for this directory, its manifest
                and its signature.

        Raises:
            ModelConfigError, InternalError: see `Incoming`.
        """
        incoming = Incoming(self.path, name)
        try:
            if all_but:
                tree = self.tree(name)
                send_tree(tree, incoming, leave_out=lambda path: replaced_by(path, all_but))
            yield incoming
        finally:
            incoming.close()

    def send(
        self, name: str, sink: Sink, progress: Callable[[int], None] | None = None
    ) -> dict[str, FileContent]:
        """Send all files of model `name`, with manifest and signature; return their contents.

        Raises:
            ModelConfigError: the model does not exist, is unusable, or changed during the
                transfer.
        """
        return send_tree(self.tree(name), sink, progress=progress)

    def roll_back(self, name: str) -> int:
        """See `incoming.roll_back`. Raises: NotFound, ModelConfigError, InternalError."""
        return roll_back(self.path, name)

    def to_last_good(self, name: str, store: str = "") -> int:
        """Place the last known good copy of `name` from the daemon that watches this repository.

        Args:
            name: the model.
            store: the store of the daemon; empty searches the usual places.

        Returns:
            The time just before the placement, `time.monotonic_ns()`; 0 if the content was there.

        Raises:
            NotFound: no daemon watches the repository, or it has no good copy of the model.
            SettingsError: the daemon's store cannot be read.
            ModelConfigError: the copy is damaged.
            InternalError: see `Incoming`.
        """
        there = followed(self.path, store)
        if there is None:
            raise NotFound(
                f"{self.path}: no daemon is known that follows it; name its store with --store"
            )
        told = there.report.models.get(name)
        if told is None or not told.copy:
            raise NotFound(f"{there.store}: nothing is known to be good of model '{name}'")
        copy = there.store / told.copy
        with self.receiving(name) as incoming:
            contents = LocalRepository(copy.parent).send(copy.name, incoming)
            if digest_of(contents, incoming.empty_directories) != told.last_good:
                raise ModelConfigError(
                    f"{copy}: is damaged: its content is not {told.last_good[:12]}, which was last "
                    "found good; push the model again"
                )
            incoming.place(contents)
            return incoming.placed_ns

    def wait_for(self, wanted: Wanted) -> tuple[str, Verdict]:
        """See `verdict.wait_for`. Raises: SettingsError."""
        return wait_for(self.path, wanted)

    def models_told(self, store: str = "") -> dict[str, Verdict] | None:
        """See `verdict.models_told`. Raises: SettingsError."""
        return models_told(self.path, store)


def replaced_by(path: str, version: str) -> bool:
    """Return whether a new directory `version` replaces the file or directory at `path`."""
    return path in ABOUT_CONTENT or path.partition("/")[0] == version


def send_tree(
    tree: ModelTree,
    sink: Sink,
    *,
    leave_out: Callable[[str], bool] = lambda _: False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, FileContent]:
    """Send all directories and files of `tree`, unchanged since its scan, to `sink`.

    Args:
        tree: the scanned model.
        sink: receives the directories and files.
        leave_out: returns True for a path that is not sent.
        progress: called with the number of bytes after each read.

    Returns:
        Path → content of each file sent.

    Raises:
        ModelConfigError: the model changed during the transfer, or cannot be read.
    """
    contents = {}
    try:
        for path in tree.directories:
            if not leave_out(path):
                sink.directory(path)
        for file in tree.files:
            if not leave_out(file.path):
                with source_of(tree, file.path, progress) as source:
                    sink.file(file.path, file.size, file.mtime_ns, source)
                    contents[file.path] = source.content()
    except OSError as error:
        raise ModelConfigError(
            f"{tree.directory}: cannot be read: {error.strerror or error}; is somebody writing "
            "to it?"
        ) from error
    if look_at(tree.repository, tree.name) != tree:
        raise ModelConfigError(
            f"{tree.directory}: was changed while it was copied; try again when nobody writes to it"
        )
    return contents
