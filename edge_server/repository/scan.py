"""A safe scan of a model repository in Triton's layout, which never leaves its directory.

Other processes write to a repository during the scan: directories vanish while they are read,
links point outside, and a pipe would block the reader for ever. Every file is therefore opened
below a descriptor of the repository itself, never through a link unless the caller allows links,
and only regular files count.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import ModelFiles, cannot_be_read, reading
from edge_server.process.disk import stays
from edge_server.process.text import is_utf8, shown
from edge_server.process.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


log = logging.getLogger(__name__)

# These names are safe in a path, a log line and a topic.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
NAME_RULE = (
    "a model name has at most 64 letters, digits, '_', '.' and '-' and starts with a letter or "
    "digit"
)
APPEARS_TWICE = "model appears in two or more repositories"
# Copying and hashing models uses both processors and disks.
_READERS = 4
_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")
# Limits against an accident or an attack: a larger scan would take too much of the board's time.
MOST_MODELS = 1000
MOST_FILES = 10_000
MOST_BYTES = 16 << 30
DEEPEST = 16
# (path, size in bytes, mtime in ns, inode, ctime in ns) of every file of a model, or of its copy
# (path, size, 0, a part of the SHA-256, 0); a size of -1 for a model that cannot be read.
# Fingerprints are compared for equality only: a clock that was set back and an older file copied
# over a newer one are changes, too.
Fingerprint = frozenset[tuple[str, int, int, int, int]]


class Repositories:
    """Model repositories in Triton's layout, read anew at each call.
    Args: read: returns the files of the model in a directory, such as of a copy; called from
        several threads. None reads the directory itself, for repositories without other writers."""

    def __init__(self, paths: Iterable[Path], read: Callable[[Path], ModelFiles] | None = None):
        self._paths = tuple(paths)
        self._read = read or files_in

    def all(self) -> dict[str, ModelFiles | ModelConfigError]:
        """Return model name → its files or the error, over all repositories, sorted by name, but
        for plain files and directories without a valid model name.
        Raises: ModelConfigError: a repository itself cannot be read."""
        directories: dict[str, list[Path]] = {}
        for path in self._paths:
            for directory in _directories(path):
                # Leftovers of file systems, editors and Python.
                if directory.name.startswith((".", "_")) or directory.name == "lost+found":
                    log.debug("repository %s: %r is no model", path, directory.name)
                elif not is_model_name(directory.name):
                    log.warning(
                        "repository %s: directory %r is left out: %s; rename it",
                        path,
                        directory.name,
                        NAME_RULE,
                    )
                else:
                    directories.setdefault(directory.name, []).append(directory)
        found = run_parallel("read", _READERS, lambda m: self._files(*m), directories.items())
        return dict(sorted(zip(directories, found, strict=True)))

    def find(self, name: str) -> ModelFiles | ModelConfigError | None:
        """Return one model's files or the error; None if no repository holds the model. An invalid
        model name never reaches the file system."""
        if not is_model_name(name):
            return None
        found = [path / name for path in self._paths if _may_be_directory(path / name)]
        return self._files(name, found) if found else None

    def names(self) -> dict[str, int]:
        """Return model name → number of repositories that hold the model.
        Raises: ModelConfigError: a repository itself cannot be read."""
        directories = (directory for path in self._paths for directory in _directories(path))
        return Counter(d.name for d in directories if is_model_name(d.name))

    @property
    def where(self) -> str:
        return ", ".join(map(str, self._paths))

    def _files(self, name: str, directories: list[Path]) -> ModelFiles | ModelConfigError:
        if len(directories) > 1:
            found = ", ".join(map(str, directories))
            log.error("model %s: not unique across all model repositories: %s", name, found)
            return ModelConfigError(f"{APPEARS_TWICE}: {found}; rename or remove all but one")
        try:
            return self._read(directories[0])
        except ModelConfigError as error:
            return error


def files_in(directory: Path) -> ModelFiles:
    return ModelFiles(directory.name, directory, _versions(directory))


def is_model_name(name: str) -> bool:
    return _MODEL_NAME.match(name) is not None


def _directories(repository: Path) -> Iterator[Path]:
    try:
        entries = sorted(repository.iterdir())
    except OSError as error:
        # May pass: the repository may be mounted later.
        raise ModelLoadError(
            f"{repository}: the model repository cannot be read: {error.strerror}"
        ) from error
    return (entry for entry in entries if _may_be_directory(entry))


def _may_be_directory(entry: Path) -> bool:
    """Return False only if `entry` is surely no directory; otherwise the read reports the error."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def _versions(model: Path) -> dict[int, Path]:
    versions: dict[int, Path] = {}
    with reading(model):
        directories = [entry for entry in model.iterdir() if entry.is_dir()]
    for entry in directories:
        if entry.name.startswith("."):
            continue
        if _VERSION.match(entry.name):
            versions[int(entry.name)] = entry
        elif entry.name.isdecimal():
            log.warning(
                "model %s: ignore version directory '%s' which contains leading zeros in its "
                "directory name",
                model.name,
                entry.name,
            )
        elif entry.name not in {"configs", "warmup", "initial_state", "golden"}:
            log.warning(
                "model %s: ignore version directory %r which fails to convert to integral number",
                model.name,
                entry.name,
            )
    return dict(sorted(versions.items()))


class SeenFile(NamedTuple):
    """A regular file of a model as scanned; two values are compared for equality only. A clock that
    was set back and an older file copied over a newer one are changes, too. A writer may set
    `mtime_ns` back, but not `ctime_ns`; 0 comes from a store that did not record it."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0

    @staticmethod
    def of(path: str, status: os.stat_result) -> SeenFile:
        return SeenFile(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


class FileSet(NamedTuple):
    """The contents of a model's directory; two values are compared for equality only."""

    files: tuple[SeenFile, ...]
    directories: tuple[str, ...]
    fault: str = ""


@dataclass(frozen=True)
class ModelTree:
    """One model's directory as scanned.

    Attributes:
        inode: device and inode number of the directory itself.
        files: sorted by path, without leftovers of editors, Python and unfinished copies.
        directories: sorted, empty version directories included.
        fault: why the model is unusable, with the remedy; empty if it is usable.
    """

    name: str
    repository: Path
    inode: tuple[int, int] = (0, 0)
    files: tuple[SeenFile, ...] = ()
    directories: tuple[str, ...] = ()
    fault: str = ""
    may_pass: bool = False
    follows_links: bool = False

    @property
    def directory(self) -> Path:
        return self.repository / self.name

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def empty_directories(self) -> tuple[str, ...]:
        return empty_directories(self.directories, (file.path for file in self.files))

    @property
    def file_set(self) -> FileSet:
        return FileSet(self.files, self.directories, self.fault)

    def require_usable(self) -> None:
        """Raises: ModelConfigError: the tree has a fault; ModelLoadError where that may pass."""
        if self.fault:
            raise (ModelLoadError if self.may_pass else ModelConfigError)(self.fault)


def models_in(repository: Path) -> list[ModelTree]:
    with _directory(repository) as descriptor:
        with os.scandir(descriptor) as entries:
            names = [
                entry.name
                for entry in entries
                if not (is_left_behind(entry.name) or entry.name.startswith("_"))
                and not entry.is_file(follow_symlinks=False)
            ]
        if len(names) > MOST_MODELS:
            raise OSError(f"more than {MOST_MODELS} directories")
        return [_scan(descriptor, repository, name) for name in sorted(names)]


def scan_model(repository: Path, name: str, *, follow_links: bool = False) -> ModelTree:
    """Scan one model's directory; a read error becomes the tree's fault.
    Args: follow_links: True follows links, for a repository whose writers are trusted."""
    with _directory(repository) as descriptor:
        return _scan(descriptor, repository, name, follow_links=follow_links)


def fingerprint(directory: Path) -> Fingerprint:
    """Return the fingerprint of the model in `directory`, which is read in place; links are
    followed."""
    try:
        tree = scan_model(directory.parent, directory.name, follow_links=True)
    except OSError as error:
        return frozenset({(str(error), -1, -1, -1, -1)})
    if tree.fault:
        return frozenset({(tree.fault, -1, -1, -1, -1)})
    # An empty version directory counts, too.
    return frozenset([*tree.files, *((path, 0, 0, 0, 0) for path in tree.directories)])


@contextmanager
def opened(tree: ModelTree, path: str) -> Iterator[int]:
    """Open the file at `path` of `tree`; follow links only if `tree` follows them.
    Raises: OSError: the file is gone, is not a regular file, or is reached through a link."""
    *folders, last = [tree.name, *path.split("/")]
    if ".." in folders:
        raise OSError(f"{path}: leads out of the model")
    no_link = 0 if tree.follows_links else os.O_NOFOLLOW
    with ExitStack() as stack:
        descriptor = stack.enter_context(_directory(tree.repository))
        for folder in folders:
            descriptor = stack.enter_context(_directory(folder, descriptor, no_link))
        # O_NONBLOCK: the open of a pipe must not wait for a writer.
        flags = os.O_RDONLY | no_link | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(last, flags, dir_fd=descriptor)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path}: no regular file")
        yield file
    finally:
        os.close(file)


def empty_directories(directories: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """Return those of `directories` that hold no directory and no file, sorted."""
    every = sorted(directories)
    used = {path.rpartition("/")[0] for path in (*every, *files)}
    return tuple(path for path in every if path not in used)


def is_left_behind(name: str) -> bool:
    """Return whether a file or directory of that name is a leftover of an editor, Python, a file
    system or an unfinished copy, and no part of a model."""
    return (
        name.startswith((".", "~"))
        or name.endswith(("~", ".tmp", ".part", ".swp", ".filepart"))
        or name in {"__pycache__", "lost+found"}
    )


@contextmanager
def _directory(path: Path | str, below: int | None = None, flags: int = 0) -> Iterator[int]:
    flags |= os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=below)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _scan(descriptor: int, repository: Path, name: str, *, follow_links: bool = False) -> ModelTree:
    if not is_model_name(name):
        # The name must be printable in the index and over MQTT.
        name = shown(name)
        return ModelTree(name, repository, fault=f"'{name}' is no model: {NAME_RULE}; rename it")
    looking = _Looking(follow_links)
    inode = (0, 0)
    try:
        with _directory(name, descriptor, looking.no_link) as root:
            status = os.fstat(root)
            inode = (status.st_dev, status.st_ino)
            looking.walk(root, "", (inode,))
    except _Unusable as fault:
        return ModelTree(name, repository, inode, fault=f"{repository / name}: {fault}")
    except OSError as error:
        why = _why(repository / name, error)
        return ModelTree(name, repository, inode, fault=why, may_pass=not stays(error))
    files, directories = tuple(sorted(looking.files)), tuple(sorted(looking.directories))
    return ModelTree(name, repository, inode, files, directories, follows_links=follow_links)


class _Unusable(Exception):
    pass


class _Looking:
    """A walk through one model's directory, within the limits of this file."""

    def __init__(self, follow_links: bool) -> None:
        self.files: list[SeenFile] = []
        self.directories: list[str] = []
        self.no_link = 0 if follow_links else os.O_NOFOLLOW
        self._follow_links = follow_links
        self._bytes = 0

    def walk(self, descriptor: int, below: str, above: tuple[tuple[int, int], ...]) -> None:
        if len(above) > DEEPEST:
            raise _Unusable(f"directories deeper than {DEEPEST}; flatten them")
        with os.scandir(descriptor) as entries:
            names = sorted(entry.name for entry in entries if not is_left_behind(entry.name))
        for name in names:
            path = f"{below}{name}"
            if not is_utf8(name):
                raise _Unusable(f"{shown(path)}: the name is not UTF-8; rename it")
            status = self._status(descriptor, name, path)
            if stat.S_ISDIR(status.st_mode):
                inode = (status.st_dev, status.st_ino)
                if inode in above:
                    continue  # a link back
                self.directories.append(path)
                with _directory(name, descriptor, self.no_link) as inner:
                    self.walk(inner, f"{path}/", (*above, inode))
            elif stat.S_ISREG(status.st_mode):
                self.files.append(SeenFile.of(path, status))
                self._bytes += status.st_size
            elif stat.S_ISLNK(status.st_mode):
                raise _Unusable(
                    f"{path} is a symbolic link, which is not followed while a repository may "
                    "change; put the file itself there"
                )
            else:
                raise _Unusable(f"{path} is no regular file; remove it")
            if len(self.files) + len(self.directories) > MOST_FILES:
                raise _Unusable(f"more than {MOST_FILES} files; is it a model?")
            if self._bytes > MOST_BYTES:
                raise _Unusable(f"more than {MOST_BYTES >> 30} GiB; is it a model?")

    def _status(self, descriptor: int, name: str, path: str) -> os.stat_result:
        try:
            return os.stat(name, dir_fd=descriptor, follow_symlinks=self._follow_links)
        except FileNotFoundError:
            if not self._follow_links:
                raise
            os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            raise _Unusable(f"{path} is a symbolic link that leads nowhere; remove it") from None


def _why(directory: Path, error: OSError) -> str:
    if error.errno in {errno.ENOTDIR, errno.ELOOP}:  # a link, not followed
        return f"{directory}: is a symbolic link, which is not followed; put the directory there"
    return str(cannot_be_read(directory, error))
