"""Receives a model into a repository: staged privately, verified, then placed atomically."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from edge_server.errors import ModelConfigError, NotFound
from edge_server.process.disk import sync
from edge_server.process.utf8 import shown
from edge_server.repository.content import Content, hashed
from edge_server.repository.manifest import ABOUT_CONTENT, MOST_BYTES, NAME, Manifest, ManifestFile
from edge_server.repository.scan import NAME_RULE, is_model_name
from edge_server.repository.transfer.entries import Entry, entries_of
from edge_server.repository.transfer.inventory import (
    look_at,
    previous,
    take_inventory,
    usable_tree,
)
from edge_server.repository.transfer.reports import last_good_copy
from edge_server.repository.transfer.swap import FILLED, lock, locked, swap, tidy, writing
from edge_server.repository.tree import (
    DEEPEST,
    MOST_FILES,
    empty_directories,
    is_left_behind,
)
from edge_server.repository.tree import MOST_BYTES as MOST_MODEL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Delivery:
    """The result of a transfer.

    Attributes:
        name: the model.
        outcome: what became of the directory with its name.
        content: the model's content after the transfer.
        placed_ns: time just before the rename, `time.monotonic_ns()`; 0 if unchanged.
        note: a remark for the user; usually empty.
    """

    name: str
    outcome: Literal["new", "replaced", "unchanged"]
    content: Content
    placed_ns: int = 0
    note: str = ""


def receive(repository: Path, entries: Iterator[Entry], name: str = "") -> Delivery:
    """Place the model that `entries` bring into `repository`, if it is as its manifest says.

    The manifest comes first and names the model. What it lists and does not come is copied from the
    model that is there. If the same content is there already, nothing changes, so
    that a second push does not lose the previous model that `roll_back` needs.

    If the process ends at any time, the model's name refers to the complete old or to the complete
    new directory. Leftovers have a dot name, and the next transfer removes them.

    Args:
        repository: the directory of the repository.
        entries: the entries of the model.
        name: the model; if given, `entries` may lack a manifest, and must be complete.

    Raises:
        ModelConfigError: the model is not as its manifest says, or larger than a model may be; or
            the model's name refers to something other than a directory.
        InternalError: the file system refuses a file or a rename.
    """
    first = next(entries, None)
    manifest = None
    if first is not None and first.path == NAME:
        if first.size > MOST_BYTES:
            raise ModelConfigError(f"{NAME}: more than {MOST_BYTES >> 20} MiB")
        data = b"".join(first.pieces())
        manifest = Manifest.parse(data)
        first = Entry.of(NAME, data, first.mtime_ns)
    if manifest is None and not name:
        raise ModelConfigError(f"what came is no model: it does not begin with {NAME}")
    incoming = Incoming(repository, name or (manifest.model if manifest else ""))
    try:
        for entry in chain([first] if first else [], entries):
            incoming.take(entry)
        if manifest is not None:
            if not name:
                incoming.complete(manifest)
            incoming.require(manifest)
        return incoming.place()
    finally:
        incoming.close()


class Incoming:
    """A model's directory that is filled under a dot name, which no scan reads."""

    def __init__(self, repository: Path, name: str) -> None:
        """Create the directory in `repository`.

        Raises:
            ModelConfigError: `name` is not a model name, or the repository does not exist.
            InternalError: the file system refuses the directory.
        """
        _require_name(name)
        self._repository = repository
        self._name = name
        self._directories = {""}
        self._files: dict[str, ManifestFile] = {}
        self._bytes = 0
        self._root = repository / f"{FILLED}{name}-{secrets.token_hex(4)}"
        with locked(repository), writing(repository):
            tidy(repository)
            self._root.mkdir()
            # Marks the directory as in use for as long as this process lives.
            self._lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(self._lock)

    @property
    def content(self) -> Content:
        empty = empty_directories(self._directories - {""}, self._files)
        return Content(dict(self._files), empty)

    def take(self, entry: Entry) -> None:
        """Write a directory or a file; return once the data of a file is durable.

        Raises:
            ModelConfigError: the path is not allowed in a model, the model is too large, or the
                entry ends early.
            InternalError: the file system refuses the entry.
        """
        parts = entry.path.split("/")
        if len(parts) > DEEPEST:
            raise ModelConfigError(
                f"{entry.path[:200]}: more than {DEEPEST} directories deep; flatten it"
            )
        if any(not part or is_left_behind(part) or "\0" in part for part in parts):
            raise ModelConfigError(f"{entry.path!r} may be no file of a model")
        self._bytes += entry.size
        folders = parts if entry.read is None else parts[:-1]
        self._directories |= {"/".join(folders[:end]) for end in range(1, len(folders) + 1)}
        count = len(self._files) + len(self._directories)
        if count > MOST_FILES or self._bytes > MOST_MODEL_BYTES:
            raise ModelConfigError(
                f"model '{self._name}': more than {MOST_FILES} files or "
                f"{MOST_MODEL_BYTES >> 30} GiB; is it a model?"
            )
        with writing(self._root):
            (self._root / "/".join(folders)).mkdir(parents=True, exist_ok=True)
        if entry.read is not None:
            self._files[entry.path] = self._write(self._root / entry.path, entry)

    def complete(self, manifest: Manifest) -> None:
        """Copy from the model that is there what `manifest` lists and has not come.

        Raises:
            ModelConfigError, InternalError: see `take`.
        """
        lacking = {*manifest.files, *(manifest.empty_directories or ())}
        lacking -= self._files.keys() | self._directories
        if lacking and os.path.lexists(self._repository / self._name):
            tree = look_at(self._repository, self._name)
            for entry in entries_of(tree, only=lacking.__contains__):
                self.take(entry)

    def require(self, manifest: Manifest) -> None:
        """Raises: ModelConfigError: what has come is not as `manifest` says."""
        content = self.content
        if fault := manifest.unfit(self._name, content.files, content.empty):
            raise ModelConfigError(f"model '{self._name}': {shown(fault)}; push it again")

    def place(self) -> Delivery:
        """Give the directory the model's name; keep the replaced model as the previous one.

        Raises:
            ModelConfigError, InternalError: see `receive`.
        """
        content = self.content
        with writing(self._root):
            for path in sorted(self._directories, reverse=True):
                sync(self._root / path)
        with locked(self._repository), writing(self._repository):
            placed_ns = time.monotonic_ns()
            target = self._repository / self._name
            if not os.path.lexists(target):
                self._root.rename(target)
                sync(self._repository)
                return Delivery(self._name, "new", content, placed_ns)
            if target.is_symlink() or not target.is_dir():
                raise ModelConfigError(f"{target}: is no directory; remove it, or rename it")
            there = take_inventory(self._repository, self._name).content
            if (
                content.files.items() <= there.files.items()
                and there.files.keys() - content.files.keys() <= ABOUT_CONTENT
                and content.empty == there.empty
            ):
                return Delivery(self._name, "unchanged", content)
            before = self._repository / previous(self._name)
            swap(self._root, target)
            if os.path.lexists(before):
                swap(self._root, before)
            else:
                self._root.rename(before)
            sync(self._repository)
        return Delivery(self._name, "replaced", content, placed_ns)

    def close(self) -> None:
        """Remove the directory if it was not placed, or the older previous model after a swap."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._lock)

    def _write(self, path: Path, entry: Entry) -> ManifestFile:
        # The umask applies, as to every file of this user.
        mode = 0o777 if entry.executable else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with writing(path), os.fdopen(os.open(path, flags, mode), "wb") as file:
            content = hashed(entry.pieces(), file.write)
            file.flush()
            os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
            os.fsync(file.fileno())
        return content


def roll_back(repository: Path, name: str) -> int:
    """Swap model `name` with its previous model; a second call undoes the swap.

    Returns:
        The time just before the swap, `time.monotonic_ns()`.

    Raises:
        NotFound: the repository holds no previous model.
        ModelConfigError: `name` is not a model name, or the repository does not exist.
        InternalError: the file system refuses a rename.
    """
    _require_name(name)
    with locked(repository), writing(repository):
        tidy(repository)
        before, target = repository / previous(name), repository / name
        if not before.is_dir() or before.is_symlink():
            raise NotFound(
                f"{repository}: of model '{name}' there is nothing to go back to: no push has "
                "replaced it yet"
            )
        began_ns = time.monotonic_ns()
        if os.path.lexists(target):
            swap(before, target)
        else:
            before.rename(target)
        sync(repository)
    return began_ns


def to_last_good(repository: Path, name: str, store: Path | None = None) -> int:
    """Place the last known good copy of `name` from the daemon that watches this repository.

    Args:
        repository: the directory of the repository.
        name: the model.
        store: the store of the daemon; None searches the usual places.

    Returns:
        The time just before the placement, `time.monotonic_ns()`; 0 if the content was there.

    Raises:
        NotFound: no daemon watches the repository, or it has no good copy of the model.
        SettingsError: the daemon's store cannot be read.
        ModelConfigError: the copy is damaged.
        InternalError: the file system refuses a file or a rename.
    """
    copy, digest = last_good_copy(repository, name, store)
    tree = usable_tree(copy.parent, copy.name)
    incoming = Incoming(repository, name)
    try:
        for entry in entries_of(tree):
            incoming.take(entry)
        if incoming.content.digest != digest:
            raise ModelConfigError(
                f"{copy}: is damaged: its content is not {digest[:12]}, which was last found "
                "good; push the model again"
            )
        return incoming.place().placed_ns
    finally:
        incoming.close()


def _require_name(name: str) -> None:
    if not is_model_name(name):
        raise ModelConfigError(f"'{shown(name)[:200]}' is no model: {NAME_RULE}; rename it")
