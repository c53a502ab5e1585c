"""Makes complete, verified private copies of a model."""

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
    """Copy `tree` to the new directory `directory`, consistent and as its manifest says.

    The copy equals `tree` at one moment: each file is checked before and after it is read, and the
    whole tree is scanned once more after the last file. The copy is not durable yet: see `seal`.

    Raises:
        TornModel: the model changed during the copy.
        ModelConfigError: the model cannot be read, or differs from its manifest.
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
    """Return the bytes of the manifest and of the signature in `directory`, None if missing."""
    return _bytes(directory / manifest.NAME), _bytes(directory / manifest.SIGNATURE_NAME)


def seal(directory: Path) -> None:
    """Make the copy in `directory` read-only and durable, except for its own directory entry."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder, name))
        Path(folder).chmod(0o555)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Sync the file or directory at `path`; return once it is safe from a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove a copy, sealed or not, as far as the file system allows."""
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
