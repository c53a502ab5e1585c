"""`manifest.json`: what a model consists of, written last, so that half of it is not believed."""

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
    """One file, by content."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a model but itself and its signature.

    Attributes:
        model: the name that the directory must have.
        files: path below the model's directory → content.
        created: RFC 3339, for people.
        empty_directories: those with nothing in them, as an ensemble's versions are; left out
            where there are none.
        allow_interface_change: it may break those who call the model that it replaces. Left out
            where it is not said, so that older daemons read it.
    """

    model: str
    files: dict[str, ManifestFile]
    format: Literal[1] = 1
    created: str = ""
    empty_directories: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    allow_interface_change: bool | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Raises: ModelConfigError: `data` is no manifest; says what is wrong."""
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, ValueError) as error:
            raise ModelConfigError(f"{NAME}: {error}; push the model again") from error

    def encode(self) -> bytes:
        data = msgspec.json.encode(self, order="sorted")
        return msgspec.json.format(data, indent=2) + b"\n"

    def missing(self, tree: ModelTree) -> str:
        """What `tree` lacks of it, or has too much, by names and sizes; empty where they agree."""
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
        """How `empty`, the directories with nothing in them, are not those that it names."""
        said = set(self.empty_directories or ())
        for path in sorted(said.symmetric_difference(empty)):
            what = "is missing" if path in said else "is not in it"
            return f"directory {path}, which is empty, {what}"
        return ""


def says_interface_change(path: Path) -> bool:
    """Whether the manifest there allows its model to break its callers; none allows nothing."""
    try:
        with path.open("rb") as file:
            said = Manifest.parse(file.read(MOST_BYTES))
    except (OSError, ModelConfigError):
        return False
    return said.allow_interface_change is True


def read_manifest(tree: ModelTree) -> Manifest:
    """The manifest in `tree`.

    Raises:
        ModelConfigError: it cannot be read, or is none.
    """
    try:
        with opened(tree, NAME) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ModelConfigError(f"{NAME}: cannot be read: {error.strerror or error}") from error
    if len(data) > MOST_BYTES:
        raise ModelConfigError(f"{NAME}: more than {MOST_BYTES >> 20} MiB")
    return Manifest.parse(data)
