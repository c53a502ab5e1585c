"""A private copy of a model: every byte of it accounted for, or no copy."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ModelConfigError
from edge_server.repository import manifest
from edge_server.repository.content import Content, read_file, torn
from edge_server.repository.manifest import Manifest
from edge_server.repository.tree import look

if TYPE_CHECKING:
    from edge_server.repository.tree import ModelTree

_MOST_BYTES = {manifest.NAME: manifest.MOST_BYTES, manifest.SIGNATURE_NAME: 64 << 10}


def copy_model(tree: ModelTree, directory: Path) -> Content:
    """Copy `tree` to `directory`, which is made; what its manifest says holds for the copy.

    The copy is what `tree` says at one moment: each file is looked at before and after it is
    read, and the whole once more after the last of them. It is not durable yet: see `seal`.

    Raises:
        TornModel: it changed meanwhile.
        ModelConfigError: it cannot be read, or is not what its manifest says.
        OSError: the copy cannot be written.
    """
    _require_usable(tree)
    directory.mkdir()
    for path in tree.directories:
        (directory / path).mkdir()
    files = {}
    for seen in tree.files:
        with (directory / seen.path).open("xb") as copy:
            files[seen.path] = read_file(tree, seen, copy)
    if not _is_still(tree):
        raise torn(tree)
    content = Content.of(tree, files)
    _require_as_manifest_says(tree, directory, content)
    return content


def what_came_with(directory: Path) -> tuple[bytes | None, bytes | None]:
    """The manifest and the signature of the copy in `directory`, as far as they are there."""
    return _bytes(directory / manifest.NAME), _bytes(directory / manifest.SIGNATURE_NAME)


def seal(directory: Path) -> None:
    """Make the copy in `directory` durable, all but its own name, and read-only."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder, name))
        Path(folder).chmod(0o555)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Returns when the file or directory at `path` would outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove a copy, sealed or not; what the file system does not let go stays."""
    with suppress(OSError):
        for folder, _, _ in os.walk(directory):
            Path(folder).chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)


def _require_usable(tree: ModelTree) -> None:
    if tree.fault:
        raise ModelConfigError(tree.fault)
    for file in tree.files:
        if file.size > _MOST_BYTES.get(file.path, file.size):
            raise ModelConfigError(
                f"{tree.directory / file.path}: {file.size} bytes, more than "
                f"{_MOST_BYTES[file.path]}; push the model again"
            )


def _is_still(tree: ModelTree) -> bool:
    try:
        return look(tree.repository, tree.name, follow_links=tree.follows_links) == tree
    except OSError:
        return False


def _require_as_manifest_says(tree: ModelTree, directory: Path, content: Content) -> None:
    data = _bytes(directory / manifest.NAME)
    if data is None:
        return
    said = Manifest.parse(data)
    if missing := said.missing(tree):
        text = f"{tree.directory / manifest.NAME}: {missing}; push the model again"
        raise ModelConfigError(text)
    for path, file in said.files.items():
        if content.files[path] != file:
            raise ModelConfigError(
                f"{tree.directory / path}: content is not what {manifest.NAME} says: torn, or "
                "damaged on the way; push it again"
            )


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
