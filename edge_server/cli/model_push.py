"""Copies models from a directory into a repository, and back."""

from __future__ import annotations

import os
import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.verbs import FAILED, OK, UNAVAILABLE
from edge_server.errors import InternalError, ModelConfigError, SettingsError
from edge_server.lifecycle.model_spec import ModelSpec
from edge_server.model_config.config import Completion
from edge_server.process.disk import atomic_write
from edge_server.repository.content import Content, content_of, usable_tree
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    NAME,
    SIGNATURE_NAME,
    Manifest,
    read_about,
    unfit,
)
from edge_server.repository.scan import files_in
from edge_server.repository.transfer import Entry, entries_of, receive
from edge_server.repository.verdicts import (
    ENDED,
    GOOD,
    NOBODY,
    ON_TRIAL,
    REPLACED,
    SILENT,
    WAITS,
    wait_for,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Generator, Iterator

    from edge_server.repository.content import Inventory
    from edge_server.repository.manifest import SigningKey
    from edge_server.repository.remote import RemoteRepository
    from edge_server.repository.scan import ModelTree
    from edge_server.repository.transfer import Delivery
    from edge_server.repository.verdicts import Verdict

    ProgressCallback = Callable[[int], None]

NOT_YET = 75

_OUTCOMES = {
    "new": "new",
    "replaced": "replaced, rollback brings the former one back",
    "unchanged": "was there already, nothing changed",
}


@contextmanager
def copy_progress(total_bytes: int = 0) -> Iterator[ProgressCallback]:
    """Count the bytes of a copy in one line, on a terminal only; cleared at the end.

    Args:
        total_bytes: size of the whole copy; 0 if unknown.
    """
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    console, is_shown = Console(stderr=True), sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("", total=total_bytes or None)
        yield lambda more_bytes: progress.advance(task, more_bytes)


def print_delivery(done: Delivery, where: Path) -> None:
    print(f"{done.name}: {done.content.digest[:12]} in {where}: {_OUTCOMES[done.outcome]}")
    if done.note:
        print(f"note: {done.note}")


def await_verdict(
    repository: Path,
    name: str,
    digest: str,
    since_ns: int,
    arguments: argparse.Namespace,
) -> int:
    """Wait for the daemon's verdict as `arguments` require and print it; return the exit code.

    Unless `arguments` require a verdict, an unreachable daemon is no failure.
    """
    if arguments.no_wait:
        return OK
    insists = arguments.wait or arguments.until_passed
    timeout_s = arguments.wait_secs
    try:
        ended, verdict = wait_for(
            repository,
            name,
            digest,
            since_ns,
            passed=arguments.until_passed,
            timeout_s=timeout_s,
            store=arguments.store,
        )
    except SettingsError as error:
        if insists:
            raise
        print(f"note: what the daemon makes of it is not known: {error}", file=sys.stderr)
        return OK
    if ended == NOBODY and not insists:
        return OK
    text, code = _in_words(name, ended, verdict, repository, timeout_s)
    if code == OK:
        print(f"{name}: {digest[:12]} {text}")
    else:
        print(f"edge-server: {name}: {text}", file=sys.stderr)
    return code


def _in_words(
    name: str, ended: str, verdict: Verdict, repository: Path, timeout_s: float
) -> tuple[str, int]:
    """Return the text and the exit code of a verdict."""
    undecided = {
        NOBODY: (
            f"no daemon that runs there follows {repository}; start one in mode poll, or name its "
            "store with --store",
            UNAVAILABLE,
        ),
        ENDED: ("the daemon ended before it decided on it", UNAVAILABLE),
        REPLACED: (
            f"{repository} no longer holds it: another push, a rollback or a removal came before "
            f"the daemon decided on it; `edge-server models list {repository}` shows what is there",
            FAILED,
        ),
        SILENT: (
            f"the daemon has not decided on it within {timeout_s:g} s "
            f"({verdict.outcome or 'not seen yet'}); `edge-server models list {repository}` shows "
            "it later",
            NOT_YET,
        ),
    }
    if ended in undecided:
        return undecided[ended]
    if verdict.outcome == GOOD:
        return "serves", OK
    if verdict.outcome == ON_TRIAL:
        return "serves, and is watched beside what served before", OK
    serves = f"{verdict.serves[:12]} serves" if verdict.serves else "nothing of that name serves"
    text = f"{verdict.outcome}: {verdict.reason}; {serves}"
    if verdict.outcome == WAITS:
        return text, NOT_YET
    if verdict.last_good:
        # A rollback would restore the content before, which may have been refused, too.
        text += (
            f"; `edge-server models rollback {name} --to {repository} --to-last-good` restores "
            f"{verdict.last_good[:12]}, what was last found good"
        )
    return text, FAILED


# The target device may have the GPUs that a configuration names, whatever this host has.
_SOMEWHERE = Completion(gpus=64)


@dataclass(frozen=True)
class Package:
    """A model that is ready to be pushed.

    Attributes:
        version: the only version that is pushed; empty for all of the model.
        content: all files that the model has after the push.
        note: a remark for the user; usually empty.
    """

    tree: ModelTree
    version: str
    content: Content
    manifest: bytes
    signature: bytes | None
    note: str = ""

    def entries(self, progress: ProgressCallback | None = None) -> Iterator[Entry]:
        """Return the manifest, the signature and the files, for `receive`.

        Raises:
            ModelConfigError: the files were changed since the package was made.
        """
        files = [file for file in self.tree.files if file.path not in ABOUT_CONTENT]
        newest_ns = max((file.mtime_ns for file in files), default=0)
        yield Entry.of(NAME, self.manifest, newest_ns)
        if self.signature is not None:
            yield Entry.of(SIGNATURE_NAME, self.signature, newest_ns)
        only = _chosen(self.version)
        yield from entries_of(self.tree, only=only, progress=progress)


def pack(
    directory: Path,
    *,
    version: int | None = None,
    there: Callable[[str], Inventory] | None = None,
    key: SigningKey | None = None,
    allow_interface_change: bool = False,
) -> Package:
    """Return the model in `directory` with a manifest of all its files.

    The model's own manifest and signature are taken unchanged if they match and no key is given;
    otherwise a new manifest is made.

    Args:
        version: takes only this version; the rest of the model is to stay in the repository as it
            is. That rest must match its manifest if it has one, and with `key` be signed by it.
        there: returns the inventory of a model of the repository; needed for a `version`.
        key: signs the manifest.
        allow_interface_change: the manifest permits a change that may break clients of the model
            that is replaced.

    Raises:
        ModelConfigError: the directory is no usable model, or another process writes to it; or
            there is no rest that may be kept.
        EdgeServerError: the repository cannot be read.
    """
    only = "" if version is None else str(version)
    if only and there is not None:
        tree = _with_version(directory, only)
        rest = there(tree.name)
        if fault := _cannot_be_kept(rest, key):
            raise ModelConfigError(f"{fault}; push the whole model, without --version")
        content = _merged(rest.content, content_of(tree, _chosen(only)), only)
        manifest, signature = rest.manifest, rest.signature
    else:
        tree = read_model(directory)
        content = content_of(tree, _chosen(""))
        manifest, signature = (read_about(tree, path) for path in (NAME, SIGNATURE_NAME))
    package = Package(tree, only, content, manifest or b"", signature)
    if (
        key is None
        and manifest is not None
        and not unfit(manifest, tree.name, content.files, content.empty)
    ):
        if not allow_interface_change or Manifest.parse(manifest).allow_interface_change is True:
            return package
        if signature is not None:
            raise ModelConfigError(
                f"model '{tree.name}': {NAME} is signed and does not allow another interface; sign "
                "it again, with --sign KEY beside --allow-interface-change"
            )
    new = Manifest.of(
        tree.name, content.files, content.empty, allow_interface_change=allow_interface_change
    ).encode()
    note = ""
    if key is None and signature is not None:
        note = f"{SIGNATURE_NAME} was of other content and is left out; sign again"
    return replace(package, manifest=new, signature=key.sign(new) if key else None, note=note)


def pull(
    name: str,
    repository: Path | RemoteRepository,
    directory: Path,
    progress: ProgressCallback | None = None,
) -> Delivery:
    """Copy model `name` of `repository` into `directory`, under its name, with all its files.

    Raises:
        ModelConfigError: the model is missing or unusable, or differs from its manifest.
        EdgeServerError: the repository cannot be reached, or `directory` refuses the model and is
            unchanged.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InternalError(f"{directory}: cannot be made: {error.strerror}") from error
    with closing(sent_entries(name, repository, progress)) as entries:
        done = receive(directory, entries, name)
    if NAME in done.content.files:
        return done
    return replace(done, note=f"it has no {NAME}: its content cannot be verified")


def sent_entries(
    name: str, repository: Path | RemoteRepository, progress: ProgressCallback | None = None
) -> Generator[Entry]:
    """Return the entries of model `name` of `repository`; raises as `pull` does."""
    if isinstance(repository, Path):
        return entries_of(usable_tree(repository, name), progress=progress)
    return repository.entries(name, progress)


def write_manifest(
    directory: Path, key: SigningKey | None, *, allow_interface_change: bool = False
) -> Package:
    """Write manifest.json, and with `key` its signature, beside the files of a model; see `pack`.

    The manifest is written last and atomically, so that a daemon that follows `directory` waits for
    it.
    """
    package = pack(directory, key=key, allow_interface_change=allow_interface_change)
    place = package.tree.directory
    try:
        if package.signature is None:
            (place / SIGNATURE_NAME).unlink(missing_ok=True)
        else:
            atomic_write(place / SIGNATURE_NAME, package.signature)
        atomic_write(place / NAME, package.manifest)
    except OSError as error:
        raise InternalError(f"{place}: cannot be written: {error.strerror}") from error
    return package


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
    tree = usable_tree(place.parent, place.name)
    for file in tree.files:
        # A manifest, or a log line about the file, could not hold such a name.
        if not file.path.isprintable():
            raise ModelConfigError(
                f"{tree.directory}: {file.path!r} is no printable text; rename that file"
            )
    return tree


def _chosen(version: str) -> Callable[[str], bool]:
    """Return whether a push of `version`, or of all if that is empty, reads the file at a path."""
    return lambda path: path not in ABOUT_CONTENT and version in ("", path.partition("/")[0])


def _merged(rest: Content, new: Content, version: str) -> Content:
    """Return the content of a model whose `version` is replaced by `new`."""
    replaced = _chosen(version)
    files = {path: file for path, file in rest.files.items() if not replaced(path)}
    empty = (path for path in rest.empty if not replaced(path))
    return Content({**files, **new.files}, tuple(sorted([*empty, *new.empty])))


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


def _cannot_be_kept(rest: Inventory, key: SigningKey | None) -> str:
    """Return why a new manifest must not vouch for the stored files; empty if it may."""
    if rest.fault:
        return rest.fault
    content, manifest = rest.content, rest.manifest
    if manifest is not None and (fault := unfit(manifest, rest.name, content.files, content.empty)):
        return f"model '{rest.name}' is not what its manifest says: {fault}"
    if key is not None and not key.has_signed(rest.manifest, rest.signature):
        return f"model '{rest.name}' was not signed with this key, which would now vouch for it"
    return ""
