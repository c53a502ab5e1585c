"""Creates the manifest of a model's files, and compares a manifest with the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from edge_server.errors import ModelConfigError
from edge_server.repository.manifest import NAME, Manifest, ManifestFile
from edge_server.repository.transfer.inventory import ABOUT_CONTENT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from edge_server.repository.transfer.inventory import FileContent


def manifest_of(
    name: str,
    contents: Mapping[str, FileContent],
    empty: Iterable[str],
    *,
    allow_interface_change: bool = False,
) -> bytes:
    """Return the manifest of these files: the same bytes, and so the same signature, for the same
    content.

    Args:
        name: the model.
        contents: path → content of the files.
        empty: the empty directories.
        allow_interface_change: True allows the model to break the callers of its predecessor.
    """
    files = {
        path: ManifestFile(*each) for path, each in contents.items() if path not in ABOUT_CONTENT
    }
    return Manifest(
        name,
        files,
        empty_directories=tuple(sorted(empty)) or msgspec.UNSET,
        allow_interface_change=True if allow_interface_change else msgspec.UNSET,
    ).encode()


def allows_interface_change(manifest: bytes) -> bool:
    """Return whether the manifest allows a change of the interface.

    Raises:
        ModelConfigError: the bytes are not a manifest.
    """
    return Manifest.parse(manifest).allow_interface_change is True


def unfit(
    manifest: bytes, name: str, contents: Mapping[str, FileContent], empty: Collection[str]
) -> str:
    """Return the first difference between the files of a model and `manifest`, or "" without one.

    Args:
        manifest: the bytes of the manifest.
        name: the model.
        contents: path → content of the files.
        empty: the empty directories.
    """
    try:
        said = Manifest.parse(manifest)
    except ModelConfigError as error:
        return str(error)
    if said.model != name:
        return f"{NAME} is of model '{said.model}'"
    there = {path: each for path, each in contents.items() if path not in ABOUT_CONTENT}
    faults = (
        _difference(path, there.get(path), said.files.get(path))
        for path in sorted(said.files.keys() | there.keys())
    )
    return next(filter(None, faults), "") or said.differing_directory(empty)


def _difference(path: str, there: FileContent | None, said: ManifestFile | None) -> str:
    if there is None:
        return f"{path} is missing"
    if said is None:
        return f"{path} is not in {NAME}"
    if there.size != said.size:
        return f"{path} has {there.size} bytes, not {said.size}"
    return "" if there.sha256 == said.sha256 else f"{path} has other content than {NAME} says"
