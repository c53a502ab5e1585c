"""Copies models from a directory into a repository, and back."""

from __future__ import annotations

import io
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import InternalError, ModelConfigError
from edge_server.lifecycle.model_spec import ModelSpec
from edge_server.model_config.config import Completion
from edge_server.repository.scan import files_in
from edge_server.repository.transfer.content_list import (
    allows_interface_change,
    manifest_of,
    unfit,
)
from edge_server.repository.transfer.inventory import (
    ABOUT_CONTENT,
    MANIFEST,
    SIGNATURE,
    Source,
    about_in,
    digest_of,
    take_inventory,
)
from edge_server.repository.transfer.local import LocalRepository, replaced_by, send_tree
from edge_server.repository.tree import empty_directories

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.repository.transfer.incoming import Outcome
    from edge_server.repository.transfer.inventory import FileContent, Inventory, Sink
    from edge_server.repository.transfer.keys import SigningKey
    from edge_server.repository.transfer.remote import RemoteRepository
    from edge_server.repository.tree import ModelTree

    Repository = LocalRepository | RemoteRepository
    Progress = Callable[[int], None]


# The target device may have the GPUs that a configuration asks for, whatever this host has.
_SOMEWHERE = Completion(gpus=64)


@dataclass(frozen=True)
class Delivery:
    """The result of a copy.

    Attributes:
        digest: of the model's content after the copy.
        note: a remark for the user; usually empty.
        placed_ns: time just before the rename, by the target's monotonic clock; 0 if unchanged.
    """

    name: str
    outcome: Outcome
    digest: str
    note: str = ""
    placed_ns: int = 0


class _About(NamedTuple):
    """The manifest and signature stored beside a model's files, and a remark for the user."""

    manifest: bytes
    signature: bytes | None
    note: str = ""


def read_model(directory: Path) -> ModelTree:
    """Return the model in `directory`, parsed as the daemon parses it, but not loaded.

    Raises:
        ModelConfigError: the directory is no usable model; names all faults of its configuration.
    """
    tree = model_tree(directory)
    model_spec = ModelSpec.read(files_in(tree.directory), completion=_SOMEWHERE)
    filename = model_spec.config.default_model_filename
    for version in model_spec.versions:
        path = model_spec.files.versions[version] / filename
        if filename and not path.exists():
            raise ModelConfigError(
                f"{path}: missing; model '{tree.name}' is loaded from it; put it there, or name "
                "another file with default_model_filename"
            )
    return tree


def model_tree(directory: Path) -> ModelTree:
    """Raises: ModelConfigError: the directory does not exist, or is unusable."""
    place = Path(os.path.abspath(directory))  # noqa: PTH100 - a link is reported, not followed
    if not place.is_dir():
        raise ModelConfigError(
            f"{directory}: no such directory; give a model's, which holds config.pbtxt and versions"
        )
    tree = LocalRepository(place.parent).tree(place.name)
    for file in tree.files:
        # A manifest, or a log line about the file, could not hold such a name.
        if not file.path.isprintable():
            raise ModelConfigError(
                f"{tree.directory}: {file.path!r} is no printable text; rename that file"
            )
    return tree


def push(
    directory: Path,
    repository: Repository,
    *,
    version: int | None = None,
    key: SigningKey | None = None,
    progress: Progress | None = None,
    allow_interface_change: bool = False,
) -> Delivery:
    """Copy the model in `directory` into `repository`, with a manifest of all its files.

    The model's own manifest and signature are copied unchanged if they match and no key is given;
    otherwise a new manifest is made.

    Args:
        version: copies only this version and leaves the rest of the model in the repository as it
            is; that rest must match its manifest if it has one, and with `key` be signed by it.
        allow_interface_change: the manifest permits a change that may break clients of the model
            that is replaced.

    Raises:
        ModelConfigError: the directory is no model, or another process writes to it.
        EdgeServerError: the repository refuses the model and is unchanged.
    """
    only = "" if version is None else str(version)
    if only:
        tree = _with_version(directory, only)
        there = repository.inventory(tree.name)
        if fault := _cannot_be_kept(there, key):
            raise ModelConfigError(
                f"{repository}: {fault}; push the whole model, without --version"
            )
        kept = {path: each for path, each in there.files.items() if not replaced_by(path, only)}
        empty = [path for path in there.empty if not replaced_by(path, only)]
        brought: Mapping[str, bytes | None] = {
            MANIFEST: there.manifest,
            SIGNATURE: there.signature,
        }
    else:
        tree, kept, empty = read_model(directory), {}, []
        brought = _brought(tree)

    def leave_out(path: str) -> bool:
        return path in ABOUT_CONTENT or (bool(only) and path.partition("/")[0] != only)

    with repository.receiving(tree.name, all_but=only) as sink:
        sent = send_tree(tree, sink, leave_out=leave_out, progress=progress)
        contents = {**kept, **sent}
        directories = [path for path in tree.directories if not leave_out(path)]
        empty = sorted([*empty, *empty_directories(directories, sent)])
        about = _about(
            tree.name, contents, empty, brought, key, allow_interface_change=allow_interface_change
        )
        contents |= _send_about(sink, about, _newest(tree))
        outcome = sink.place(contents)
    return Delivery(tree.name, outcome, digest_of(contents, empty), about.note, sink.placed_ns)


def pull(
    name: str, repository: Repository, directory: Path, progress: Progress | None = None
) -> Delivery:
    """Copy model `name` of `repository` into `directory`, under its name, with all its files.

    Raises:
        ModelConfigError: the model is missing or unusable, or differs from its manifest.
        EdgeServerError: `directory` refuses the model and is unchanged.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InternalError(f"{directory}: cannot be made: {error.strerror}") from error
    with LocalRepository(directory).receiving(name) as incoming:
        contents = repository.send(name, incoming, progress)
        note = ""
        if MANIFEST not in contents:
            note = f"it has no {MANIFEST}: nobody can tell whether it is as it was made"
        elif fault := unfit(incoming.read(MANIFEST), name, contents, incoming.empty_directories):
            raise ModelConfigError(f"{repository}: model '{name}': {fault}; push it there anew")
        outcome = incoming.place(contents)
        digest = digest_of(contents, incoming.empty_directories)
    return Delivery(name, outcome, digest, note)


def write_about(
    directory: Path, key: SigningKey | None, *, allow_interface_change: bool = False
) -> Delivery:
    """Write manifest.json, and with `key` its signature, beside the files of a model; see `push`.

    The manifest is written last and atomically, so that a daemon that follows `directory` waits for
    it.

    Raises:
        ModelConfigError: the directory is no model.
        InternalError: the files cannot be written.
    """
    tree = read_model(directory)
    inventory = take_inventory(tree.repository, tree.name)
    if inventory.fault:
        raise ModelConfigError(inventory.fault)
    brought = {MANIFEST: inventory.manifest, SIGNATURE: inventory.signature}
    about = _about(
        tree.name,
        inventory.files,
        inventory.empty,
        brought,
        key,
        allow_interface_change=allow_interface_change,
    )
    try:
        if about.signature is None:
            (tree.directory / SIGNATURE).unlink(missing_ok=True)
        else:
            _replace(tree.directory / SIGNATURE, about.signature)
        _replace(tree.directory / MANIFEST, about.manifest)
    except OSError as error:
        raise InternalError(f"{tree.directory}: cannot be written: {error.strerror}") from error
    return Delivery(tree.name, "replaced", digest_of(inventory.files, inventory.empty), about.note)


def _with_version(directory: Path, version: str) -> ModelTree:
    tree = model_tree(directory)
    if version not in tree.directories:
        raise ModelConfigError(
            f"{tree.directory / version}: no such directory; it has "
            f"{', '.join(d for d in tree.directories if d.isdecimal()) or 'no version'}"
        )
    # A directory without config.pbtxt is only complete together with the repository's files.
    if any(file.path == "config.pbtxt" for file in tree.files):
        read_model(directory)
    return tree


def _cannot_be_kept(there: Inventory, key: SigningKey | None) -> str:
    """Return why a new manifest must not vouch for the stored files; empty if it may."""
    if there.fault:
        return there.fault
    manifest = there.manifest
    if manifest is not None and (fault := unfit(manifest, there.name, there.files, there.empty)):
        return f"model '{there.name}' is not what its manifest says: {fault}"
    if key is not None and not key.has_signed(there.manifest, there.signature):
        return f"model '{there.name}' was not signed with this key, which would now vouch for it"
    return ""


def _brought(tree: ModelTree) -> Mapping[str, bytes | None]:
    try:
        return about_in(tree)
    except OSError as error:
        raise ModelConfigError(
            f"{tree.directory}: its {MANIFEST} or {SIGNATURE} cannot be read: {error.strerror}"
        ) from error


def _about(
    name: str,
    contents: Mapping[str, FileContent],
    empty: Sequence[str],
    brought: Mapping[str, bytes | None],
    key: SigningKey | None,
    *,
    allow_interface_change: bool,
) -> _About:
    manifest, signature = brought.get(MANIFEST), brought.get(SIGNATURE)
    if key is None and manifest is not None and not unfit(manifest, name, contents, empty):
        if not allow_interface_change or allows_interface_change(manifest):
            return _About(manifest, signature)
        if signature is not None:
            raise ModelConfigError(
                f"model '{name}': {MANIFEST} is signed and does not allow another interface; sign "
                "it anew, with --sign KEY beside --allow-interface-change"
            )
    manifest = manifest_of(name, contents, empty, allow_interface_change=allow_interface_change)
    if key is not None:
        return _About(manifest, key.sign(manifest))
    if signature is not None:
        return _About(
            manifest, None, f"{SIGNATURE} was of other content and is left out; sign anew"
        )
    return _About(manifest, None)


def _send_about(sink: Sink, about: _About, mtime_ns: int) -> dict[str, FileContent]:
    sent = {}
    for path, data in ((SIGNATURE, about.signature), (MANIFEST, about.manifest)):
        if data is not None:
            source = Source(io.BytesIO(data).read)
            sink.file(path, len(data), mtime_ns, source)
            sent[path] = source.content()
    return sent


def _newest(tree: ModelTree) -> int:
    return max((f.mtime_ns for f in tree.files if f.path not in ABOUT_CONTENT), default=0)


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
