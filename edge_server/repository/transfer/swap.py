"""Atomic renames in a repository, with the repair after a crash."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from edge_server.errors import InternalError, ModelConfigError
from edge_server.process.disk import lock_directory
from edge_server.repository.scan import is_model_name
from edge_server.repository.transfer.inventory import previous

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Prefixes of a directory that is being filled, and of one set aside between two renames.
FILLED = ".incoming-"
_ASIDE = ".outgoing-"

# From linux/fs.h and fcntl.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})


@contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Hold the lock of `repository` inside the block, so that no other transfer renames there.

    Raises:
        ModelConfigError: the repository cannot be opened.
    """
    try:
        descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelConfigError(
            f"{repository}: the model repository cannot be opened: {error.strerror}; make the "
            "directory first, or give another one"
        ) from error
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def swap(one: Path, other: Path) -> None:
    """Swap the names of two directories, atomically if the file system can do that.

    Otherwise `other` is missing for a moment; after a crash in that moment `tidy` restores it.
    """
    if _exchange(one, other):
        return
    aside = other.with_name(f"{_ASIDE}{secrets.token_hex(4)}-{other.name}")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def _exchange(one: Path, other: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def tidy(repository: Path) -> None:
    """Remove the leftovers of an interrupted push, and restore a name that it moved aside."""
    for path in sorted(repository.iterdir()):
        if path.name.startswith(_ASIDE):
            name = path.name[len(_ASIDE) :].partition("-")[2]
            if name and not os.path.lexists(repository / name):
                path.rename(repository / name)
            elif is_model_name(name) and not os.path.lexists(repository / previous(name)):
                path.rename(repository / previous(name))
            else:
                shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(FILLED) and not _is_at_work(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_at_work(path: Path) -> bool:
    try:
        os.close(lock_directory(path))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock(descriptor: int) -> None:
    """Wait for the lock of the open file or directory, and hold it until the descriptor closes."""
    # A network file system may lack locks; then users must avoid two pushes at the same time.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an OSError inside the block into an error that names the file.

    Raises:
        InternalError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise InternalError(
            f"{error.filename or place}: cannot be written: {error.strerror or error}"
        ) from error
