"""The socket's place belongs to one daemon; it alone replaces what an earlier one left."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from edge_server.api.grpc.server import UnixSocket
from edge_server.errors import AlreadyRunning, SettingsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "grpc.sock"


@pytest.fixture
def left_behind(path: Path) -> Iterator[Path]:
    """A socket whose daemon is gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        yield path


def test_what_a_dead_daemon_left_is_replaced(left_behind: Path) -> None:
    place = UnixSocket(str(left_behind))
    assert not left_behind.exists()
    place.release()


def test_a_second_daemon_is_refused_and_touches_nothing(left_behind: Path) -> None:
    first = UnixSocket(str(left_behind))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left_behind))
        with pytest.raises(AlreadyRunning, match="another daemon serves there"):
            UnixSocket(str(left_behind))
        assert left_behind.is_socket()
    first.release()
    assert not left_behind.exists()
    UnixSocket(str(left_behind)).release()


def test_what_is_no_socket_stays_and_is_named(path: Path) -> None:
    path.write_text("precious")
    for _ in range(2):  # nor is the lock kept
        with pytest.raises(SettingsError, match=r"grpc\.sock: is there and is no socket"):
            UnixSocket(str(path))
    assert path.read_text() == "precious"


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"/gone: No such file.*make the directory"):
        UnixSocket(str(tmp_path / "gone" / "grpc.sock"))


def test_a_directory_where_anybody_may_write_is_refused_unless_each_keeps_his_own(
    path: Path,
) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(SettingsError, match="chmod o-w"):
        UnixSocket(str(path))
    path.parent.chmod(0o1777)
    UnixSocket(str(path)).release()


def test_the_lock_follows_no_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "grpc.sock.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match=r"grpc\.sock\.lock"):
        UnixSocket(str(path))
    assert not (tmp_path / "elsewhere").exists()


def test_owner_and_group_may_connect_once_somebody_listens(path: Path) -> None:
    place = UnixSocket(str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        place.let_group_in()
        assert os.stat(path).st_mode & 0o777 == 0o660  # noqa: PTH116
    place.release()


def test_an_address_escapes_what_grpc_would_misread(tmp_path: Path) -> None:
    place = UnixSocket(str(tmp_path / "a b#c"))
    assert place.address == f"unix:{tmp_path}/a%20b%23c"
    place.release()
