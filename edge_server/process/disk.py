"""The daemon's directory, durable writes, locks, and the errors for paths that cannot be used."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

# The path is of the wrong kind, e.g. a link, a file, a pipe.
_OTHER_KIND = frozenset(
    {
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ENXIO,
    }
)
# The path is missing, or closed to this user.
_ABSENT = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, None})
_PIECE_BYTES = 1 << 20
# The directory that StateDirectory= of the systemd unit creates.
INSTALLED_STATE = Path("/var/lib/edge_server")


def stays(error: OSError, *, mounted: bool = True) -> bool:
    """Return whether the operation fails until someone changes the path; every other error, like
    EIO, ESTALE, EMFILE or a full disk, may pass.

    Args:
        error: without an errno it is our own, about a file.
        mounted: False for a path that may be missing, or closed, until its disk is mounted.
    """
    return error.errno in _OTHER_KIND or (mounted and error.errno in _ABSENT)


def open_regular(path: Path) -> int:
    """Return the descriptor of a regular file for reading, without waiting as a pipe would."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return descriptor


def error_of_place(error: OSError, text: str) -> SettingsError | Unavailable:
    """Return the error for a path, so that systemd restarts the daemon only where a restart may
    help."""
    return (SettingsError if stays(error, mounted=False) else Unavailable)(text)


def atomic_write(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o666,
    beside: Path | None = None,
    previous: Path | None = None,
) -> None:
    """Return when `path` durably holds `data`; until then its content is unchanged.

    Args:
        mode: before the umask.
        beside: the file that is written first; by default one of this process alone.
        previous: gets the former content; a crash may leave it there, and `path` missing.
    """
    beside = beside or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(beside, flags, mode), "wb") as file:
            file.write(data)
        atomic_replace(beside, path, previous=previous)
    finally:
        beside.unlink(missing_ok=True)


def atomic_replace(written: Path, path: Path, *, previous: Path | None = None) -> None:
    """Atomically and durably replace `path` by `written`, on the same file system; for `previous`
    see `atomic_write`."""
    sync(written)
    if previous is not None:
        with suppress(FileNotFoundError):
            path.replace(previous)
    written.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync the file or directory at `path`; return once it is safe from a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def make_locked_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """Create a directory that only its owner may enter, and lock it.

    It has no name with that prefix before it is locked, so that one which is not locked has lost
    its process: see `orphans`, which may take the new one for an orphan until then.

    Returns:
        The directory, and the descriptor that holds the lock.
    """
    while True:
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        try:
            lock = lock_directory(new)
        except (FileNotFoundError, BlockingIOError):
            continue
        try:
            return new.rename(new.with_name(new.name[1:])), lock
        except FileNotFoundError:
            os.close(lock)


def orphans(parent: Path, prefix: str) -> Iterator[tuple[Path, int]]:
    """Return the directories with `prefix` of this user whose process is gone, each with the
    descriptor of its lock, which is closed before the next one; those of a process that died before
    it had named them are removed."""
    for path in (*parent.glob(f"{prefix}*"), *parent.glob(f".{prefix}*")):
        with suppress(OSError):
            lock = lock_directory(path)
            try:
                if path.name.startswith("."):
                    path.rmdir()
                else:
                    yield path, lock
            finally:
                os.close(lock)


def free_bytes(directory: Path) -> int:
    """Return the space below `directory` that is free for users other than root."""
    numbers = os.statvfs(directory)
    return numbers.f_bavail * numbers.f_frsize


def floor_bytes(directory: Path, reserve_bytes: int = 256 << 20) -> int:
    """Return the space that shall stay free on the disk of `directory`: the reserve, but at most a
    twentieth of a small disk. Plans and unpacked archives, which no setting is about, leave the
    default."""
    numbers = os.statvfs(directory)
    return min(reserve_bytes, numbers.f_blocks * numbers.f_frsize // 20)


def lock_file(path: Path, mode: int = 0o600) -> int:
    """Create the file if it is missing, lock it, and return the descriptor that holds the lock;
    raise BlockingIOError where another process has it. On a read-only disk it must be there."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, mode)
    except OSError as error:
        if error.errno != errno.EROFS or not path.exists():
            raise
        descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def lock_directory(directory: Path) -> int:
    """Lock `directory` and return the descriptor that holds the lock.

    Raises:
        OSError: `directory` is not a directory of this user, or another process has locked it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(directory, flags)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{directory}: of another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def state_directory() -> Path:
    """Return systemd's state directory, otherwise the user's."""
    state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if state:
        return Path(state)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "edge_server"


def installed_state() -> Path:
    """Return the state directory of the installed daemon if there is one, otherwise this user's."""
    return INSTALLED_STATE if INSTALLED_STATE.is_dir() else state_directory()


def states_here() -> list[Path]:
    """Return where the state of a daemon may be here: the installed one's, then this user's."""
    return list(dict.fromkeys((INSTALLED_STATE, state_directory())))


def cache_directory() -> Path:
    """Return systemd's cache directory, otherwise the user's: for what can be fetched again."""
    if cache := os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]:
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_server"
