"""`manifest.json`: the list of a model's files, written last, so that a partial copy shows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from edge_server.errors import ModelConfigError
from edge_server.repository.tree import opened

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from edge_server.repository.tree import ModelTree

NAME = "manifest.json"
SIGNATURE_NAME = "manifest.json.sig"
MOST_BYTES = 4 << 20


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of one file: SHA-256 in hex, and size in bytes."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of all files of a model except the manifest and its signature.

    Attributes:
        model: the name that the directory must have.
        files: path relative to the model's directory → content.
        format: the version of the format.
        created: the time of creation, RFC 3339, for information only.
        empty_directories: the empty directories, such as the versions of an ensemble; left out if
            there are none.
        allow_interface_change: True allows the model to break the callers of its predecessor; left
            out if unset, so that older daemons can read the manifest.
    """

    model: str
    files: dict[str, ManifestFile]
    format: Literal[1] = 1
    created: str = ""
    empty_directories: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    allow_interface_change: bool | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Return the manifest in `data`.

        Raises:
            ModelConfigError: `data` is not a manifest; the text names the fault.
        """
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, ValueError) as error:
            raise ModelConfigError(f"{NAME}: {error}; push the model again") from error

    def encode(self) -> bytes:
        data = msgspec.json.encode(self, order="sorted")
        return msgspec.json.format(data, indent=2) + b"\n"

    def missing(self, tree: ModelTree) -> str:
        """Return the first difference of `tree` by name or size, or "" if there is none."""
        there = {file.path: file.size for file in tree.files}
        there.pop(NAME, None)
        there.pop(SIGNATURE_NAME, None)
        if self.model != tree.name:
            return f"it is of model '{self.model}'"
        for path, file in sorted(self.files.items()):
            size = there.pop(path, None)
            if size is None:
                return f"{path} is missing"
            if size != file.size:
                return f"{path} has {size} bytes, not {file.size}"
        for path in sorted(there):
            return f"{path} is not in it"
        return self.differing_directory(tree.empty_directories)

    def differing_directory(self, empty: Collection[str]) -> str:
        """Return the first difference between `empty`, the empty directories, and the manifest's,
        or "" if there is none."""
        said = set(self.empty_directories or ())
        for path in sorted(said.symmetric_difference(empty)):
            what = "is missing" if path in said else "is not in it"
            return f"directory {path}, which is empty, {what}"
        return ""


def says_interface_change(path: Path) -> bool:
    """Return whether the manifest at `path` allows its model to break its callers.

    A missing or invalid manifest does not.
    """
    try:
        with path.open("rb") as file:
            said = Manifest.parse(file.read(MOST_BYTES))
    except (OSError, ModelConfigError):
        return False
    return said.allow_interface_change is True


def read_manifest(tree: ModelTree) -> Manifest:
    """Return the manifest in `tree`.

    Raises:
        ModelConfigError: the manifest cannot be read, or is invalid.
    """
    try:
        with opened(tree, NAME) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ModelConfigError(f"{NAME}: cannot be read: {error.strerror or error}") from error
    if len(data) > MOST_BYTES:
        raise ModelConfigError(f"{NAME}: more than {MOST_BYTES >> 20} MiB")
    return Manifest.parse(data)
