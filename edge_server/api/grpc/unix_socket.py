"""UnixSocket: the socket's path, held by one daemon at a time."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from edge_server.errors import AlreadyRunning, SettingsError
from edge_server.process.disk import error_of_place, lock_file


class UnixSocket:
    """Reserves a path for this daemon alone, from construction to `release`.

    The lock is on `<path>.lock` beside the socket, a file that stays: the kernel releases the lock
    however a process ends. A stale socket is thereby distinguished from a served one, and only the
    holder of the lock replaces the socket. The directory decides which users may connect: its owner
    and its group may, others if its mode allows.

    Raises:
        AlreadyRunning: another daemon holds the lock.
        SettingsError: the path cannot be used; the text names it and the remedy.
        Unavailable: the directory does not exist yet, or is not writable.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        _require_safe_directory(self.path.parent)
        self._lock = _lock(self.path)
        try:
            _require_socket_or_nothing(self.path)
            self.path.unlink(missing_ok=True)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def address(self) -> str:
        """The address in gRPC's notation, which escapes some characters."""
        return f"unix:{quote(str(self.path.absolute()))}"

    def let_group_in(self) -> None:
        """Open the socket to its group; call after listening, which applies the umask."""
        self.path.chmod(0o660)

    def connect(self, timeout_s: float) -> socket.socket:
        """Raises: OSError: no server listens there, or the connection took too long."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(str(self.path))
        except BaseException:
            connection.close()
            raise
        return connection

    def release(self) -> None:
        """Remove the socket and release the lock."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def check_path(path: str) -> None:
    """Return if a socket may be at `path`; changes nothing.

    Raises:
        SettingsError: the path cannot be used; the text names it and the remedy.
        Unavailable: the directory does not exist yet.
    """
    _require_safe_directory(Path(path).parent)
    _require_socket_or_nothing(Path(path))


def _require_socket_or_nothing(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SettingsError(
                f"grpc.socket: {path}: is there and is no socket; remove it, or choose another "
                "path with --grpc-socket"
            )


def _require_safe_directory(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise error_of_place(
            error,
            f"grpc.socket: {directory}: {error.strerror}; make the directory, for this user and "
            "the group that may connect (systemd: RuntimeDirectory=)",
        ) from error
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise SettingsError(
            f"grpc.socket: {directory}: anybody could put another socket there; chmod o-w it"
        )


def _lock(path: Path) -> int:
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        return lock_file(lock_path)
    except BlockingIOError:
        raise AlreadyRunning(
            f"grpc.socket: {path}: another daemon serves there; stop it, or choose another path "
            "with --grpc-socket"
        ) from None
    except OSError as error:
        raise error_of_place(error, f"grpc.socket: {lock_path}: {error.strerror}") from error
