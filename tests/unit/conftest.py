"""Small real models for unit tests, built where they are needed."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.fake_board import FakeBoard

from edge_server.repository import content

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


_REAL_PARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "socket.bind"}
_IN_TEST = threading.Event()


def _refuse_real_parts(event: str, arguments: tuple[object, ...]) -> None:
    if event in _REAL_PARTS and _IN_TEST.is_set():
        # A Unix socket's address may be a lock, and ctypes finds libraries by ldconfig.
        is_lock = event.startswith("socket") and not isinstance(arguments[1], tuple)
        if is_lock or arguments[0] == "/sbin/ldconfig":
            return
        pytest.fail(f"{event}: a unit test starts no process and opens no port; tests/integration")


sys.addaudithook(_refuse_real_parts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Refuse processes and ports to the test itself, not to fixtures, which compile simulations."""
    _IN_TEST.set()
    try:
        return (yield)
    finally:
        _IN_TEST.clear()


@pytest.fixture(scope="session", autouse=True)
def no_later_timestamp_is_waited_for() -> Iterator[None]:
    """A copy of a model waits until a further change would show in the file's timestamp, which is
    real time; tests/integration/test_model_copies.py is about that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "_TICK_NS", 0)
        yield


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: no unit test waits for a disk."""
    shared = Path("/dev/shm")  # noqa: S108 - the tests' own folder is made in it
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


@pytest.fixture
def unreadable() -> Callable[[Path], None]:
    """Makes a path that the file system refuses to everyone, root included."""

    def make(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("x" * 300)  # ENAMETOOLONG when it is followed

    return make


@pytest.fixture
def fake_board(tmp_path: Path) -> FakeBoard:
    """The files of a machine without anything special: a desktop, until it is made a Jetson."""
    return FakeBoard(tmp_path / "board")
