"""`manifest.json`: the list of a model's files, written last, so that a partial copy shows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import cannot_be_read
from edge_server.repository.tree import opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from edge_server.repository.tree import ModelTree

NAME = "manifest.json"
SIGNATURE_NAME = "manifest.json.sig"
# Neither file is content; both describe the content.
ABOUT_CONTENT = frozenset({NAME, SIGNATURE_NAME})
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
    def of(
        name: str,
        files: Mapping[str, ManifestFile],
        empty: Iterable[str],
        *,
        allow_interface_change: bool = False,
    ) -> Manifest:
        """Return the manifest of these files; equal content gives equal bytes, and so an equal
        signature.

        Args:
            name: the model.
            files: path → content; the manifest and its signature are left out.
            empty: the empty directories.
            allow_interface_change: True allows the model to break the callers of its predecessor.
        """
        return Manifest(
            name,
            {path: file for path, file in files.items() if path not in ABOUT_CONTENT},
            empty_directories=tuple(sorted(empty)) or msgspec.UNSET,
            allow_interface_change=allow_interface_change or msgspec.UNSET,
        )

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Return the manifest in `data`.

        Raises:
            ModelConfigError: `data` is not a manifest; the text names the fault.
        """
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ModelConfigError(f"{NAME}: {error}; push the model again") from error

    def encode(self) -> bytes:
        data = msgspec.json.encode(self, order="sorted")
        return msgspec.json.format(data, indent=2) + b"\n"

    def missing(self, tree: ModelTree) -> str:
        """Return the first difference of `tree` by name or size, or "" if there is none.

        The text calls the manifest "it", to stand behind the manifest's name.
        """
        sizes = {file.path: file.size for file in tree.files}
        return self._difference(tree.name, sizes, tree.empty_directories, "it")

    def changed(self, files: Mapping[str, ManifestFile]) -> str:
        """Return the path of the first file of other content than in `files`, which holds all of
        them, or "" if there is none."""
        return next((p for p, file in sorted(self.files.items()) if files[p] != file), "")

    def unfit(self, name: str, files: Mapping[str, ManifestFile], empty: Iterable[str]) -> str:
        """Return the first difference of model `name` by content, or "" if there is none.

        Args:
            name: the model.
            files: path → content of its files.
            empty: its empty directories.
        """
        sizes = {path: file.size for path, file in files.items()}
        if difference := self._difference(name, sizes, empty, NAME):
            return difference
        path = self.changed(files)
        return f"{path} has other content than {NAME} says" if path else ""

    def _difference(
        self, name: str, sizes: Mapping[str, int], empty: Iterable[str], manifest: str
    ) -> str:
        if self.model != name:
            return f"{manifest} is of model '{self.model}'"
        there = {path: size for path, size in sizes.items() if path not in ABOUT_CONTENT}
        for path in sorted(self.files.keys() | there.keys()):
            if path not in there:
                return f"{path} is missing"
            if path not in self.files:
                return f"{path} is not in {manifest}"
            if there[path] != self.files[path].size:
                return f"{path} has {there[path]} bytes, not {self.files[path].size}"
        listed = set(self.empty_directories or ())
        for path in sorted(listed.symmetric_difference(empty)):
            problem = "is missing" if path in listed else f"is not in {manifest}"
            return f"directory {path}, which is empty, {problem}"
        return ""


def unfit(
    manifest: bytes, name: str, files: Mapping[str, ManifestFile], empty: Iterable[str]
) -> str:
    """Return the fault of `manifest`, or the first difference of the model as `Manifest.unfit`."""
    try:
        return Manifest.parse(manifest).unfit(name, files, empty)
    except ModelConfigError as error:
        return str(error)


def allows_interface_change(path: Path) -> bool:
    """Return whether the manifest at `path` allows its model to break its callers.

    A missing or invalid manifest does not.
    """
    try:
        with path.open("rb") as file:
            manifest = Manifest.parse(file.read(MOST_BYTES))
    except (OSError, ModelConfigError):
        return False
    return manifest.allow_interface_change is True


def read_manifest(tree: ModelTree) -> Manifest:
    """Return the manifest in `tree`.

    Raises:
        ModelConfigError: the manifest cannot be read, or is invalid.
    """
    data = read_about(tree, NAME) or b""
    if len(data) > MOST_BYTES:
        raise ModelConfigError(f"{NAME}: more than {MOST_BYTES >> 20} MiB")
    return Manifest.parse(data)


def read_about(tree: ModelTree, path: str) -> bytes | None:
    """Return the manifest or the signature of `tree`, which is at `path`; None if there is none.

    A file that is too long is cut, but long enough to be found invalid.

    Raises:
        ModelConfigError: the file cannot be read.
    """
    if all(file.path != path for file in tree.files):
        return None
    try:
        with opened(tree, path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise cannot_be_read(path, error) from error
