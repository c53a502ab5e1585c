"""A repository on this machine, as models are delivered to it and fetched from it.

This is what serves on the far side of a push too: only the standard library here
(`far_side.py`).
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
    """A directory with models in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """The models here, sorted; also what may be none, for `stock` to tell.

        Raises:
            ModelConfigError: it cannot be read.
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
        """All of model `name`, read.

        Raises:
            ModelConfigError: the repository cannot be read.
        """
        return take_inventory(self.path, name)

    def tree(self, name: str) -> ModelTree:
        """Model `name`, looked at.

        Raises:
            ModelConfigError: it is not there or cannot be used.
        """
        if not is_model_name(name) or not os.path.lexists(self.path / name):
            raise ModelConfigError(f"{self.path}: there is no model '{name}'")
        tree = look_at(self.path, name)
        if tree.fault:
            raise ModelConfigError(tree.fault)
        return tree

    @contextmanager
    def receiving(self, name: str, all_but: str = "") -> Iterator[Incoming]:
        """A place to fill with model `name`; unless it is placed, nothing has happened.

        Args:
            all_but: where it is given, the model that is there is taken over but for this
                directory and its manifest.

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
        """All files of model `name`, and what tells of them; what each consisted of.

        Raises:
            ModelConfigError: it is not there, cannot be used, or is changed meanwhile.
        """
        return send_tree(self.tree(name), sink, progress=progress)

    def roll_back(self, name: str) -> int:
        """See `incoming.roll_back`. Raises: NotFound, ModelConfigError, InternalError."""
        return roll_back(self.path, name)

    def to_last_good(self, name: str, store: str = "") -> int:
        """Put back what the daemon that follows this repository knows to be good.

        Args:
            store: the daemon's; the usual ones where it is empty.

        Returns:
            When, just before: `time.monotonic_ns()`; 0 where it was there already.

        Raises:
            NotFound: no daemon follows it, or it knows of nothing good.
            SettingsError: the daemon's store may not be read.
            ModelConfigError: the copy is not what was found good.
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
    """Whether a new directory `version` takes the place of the file or directory at `path`."""
    return path in ABOUT_CONTENT or path.partition("/")[0] == version


def send_tree(
    tree: ModelTree,
    sink: Sink,
    *,
    leave_out: Callable[[str], bool] = lambda _: False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, FileContent]:
    """Everything in `tree`, as it was when it was looked at, or an error.

    Returns:
        What each file consisted of.

    Raises:
        ModelConfigError: it is changed meanwhile, or cannot be read.
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
