"""Whatever a function does to its own process, the caller gets a result or a reason in time."""

from __future__ import annotations

import errno
import gc
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import is_running
from support.waiting import wait_until

from edge_server.errors import Unavailable
from edge_server.process.child import (
    ChildFailed,
    ChildOptions,
    ChildStopped,
    examined,
    run_in_child,
)


def failure(function: str, *arguments: object, timeout_s: float = 60.0) -> str:
    with pytest.raises(ChildFailed) as caught:
        run_in_child(function, *arguments, timeout_s=timeout_s)
    return str(caught.value)


def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def without_a_descriptor(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    gc.collect()  # a test before this one may have left some
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "pidfd_open", without_a_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        run_in_child("signal:pause")
    (pid,) = pids
    assert not is_running(pid)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_result_of_the_function_comes_back() -> None:
    assert run_in_child("json:loads", '{"a": [1, null]}') == {"a": [1, None]}


def test_output_of_a_library_is_no_part_of_the_result() -> None:
    noisy = "__import__('os').write(1, b'noise') and print('more') or {'a': 1}"
    assert run_in_child("builtins:eval", noisy) == {"a": 1}


def test_a_crash_is_reported_by_its_signal() -> None:
    assert failure("os:abort") == "died of SIGABRT"
    crash = "print('the plan', flush=True) or __import__('ctypes').string_at(0)"
    assert failure("builtins:eval", crash) == "died of SIGSEGV: the plan"


def test_a_process_that_is_asked_to_end_did_not_fail_by_itself() -> None:
    with pytest.raises(ChildStopped, match="was ended by SIGTERM"):
        run_in_child("signal:raise_signal", int(signal.SIGTERM))


def test_a_hang_costs_its_timeout() -> None:
    assert failure("signal:pause", timeout_s=0.5) == "gave no result within 0.5 s"


def test_an_exception_and_an_exit_are_reported() -> None:
    assert failure("json:loads", "{").startswith("failed: json.decoder.JSONDecodeError")
    assert failure("edge_server.nowhere:at_all").startswith("failed: ModuleNotFoundError")
    assert failure("sys:exit", 3) == "ended with code 1 and no result: SystemExit: 3"
    assert failure("os:_exit", 3) == "ended with code 3 and no result"


def test_an_error_of_the_house_is_raised_as_itself() -> None:
    with pytest.raises(Unavailable, match="its limit of memory was not enough"):
        run_in_child("builtins:bytearray", 1 << 30, options=ChildOptions(memory_bytes=1 << 29))


def test_another_python_needs_no_package_of_ours(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert examined(str(python), ["json", "msgspec"]) == (version, ["msgspec"])
    printed: list[bytes] = []
    said = "print('said') or float('nan')"
    result = run_in_child("builtins:eval", said, python=str(python), on_output=printed.append)
    assert math.isnan(result)
    assert b"".join(printed) == b"said\n"


def test_events_come_before_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sender.py").write_text(
        "def send_each(send, texts):\n    for text in texts: send(text)\n    return len(texts)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events: list[object] = []
    assert run_in_child("sender:send_each", ["a", "b"], on_event=events.append) == 2
    assert events == ["a", "b"]


def test_a_watch_that_raises_ends_the_process() -> None:
    def watch() -> None:
        raise Unavailable("enough")

    with pytest.raises(Unavailable, match="enough"):
        run_in_child("signal:pause", watch=watch)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")
def test_root_runs_the_function_as_the_account_that_is_named() -> None:
    ids = "(lambda os: [*os.getresuid(), *os.getgroups()])(__import__('os'))"
    options = ChildOptions(account=(990, (990, 44)))
    assert run_in_child("builtins:eval", ids, options=options) == [990, 990, 990, 44, 990]


def test_a_crash_is_the_end_of_what_the_process_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"sleep 600 & echo $! >>{pids}; kill -ABRT $PPID"
    assert failure("os:system", program, timeout_s=30) == "died of SIGABRT"
    pid = int(pids.read_text())
    wait_until(lambda: not is_running(pid))

    forks = "__import__('os').fork() and __import__('os').abort() or __import__('signal').pause()"
    assert failure("builtins:eval", forks, timeout_s=30) == "died of SIGABRT"


@pytest.mark.parametrize("start_s", [0, 1])
def test_the_process_ends_with_its_parent(tmp_path: Path, start_s: int) -> None:
    # Where it starts slowly, its parent ends before it can ask the kernel to be killed.
    (tmp_path / "sitecustomize.py").write_text(f"__import__('time').sleep({start_s})")
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "from edge_server.process.child import run_in_child\nrun_in_child('signal:pause')",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    pids = wait_until(lambda: children.read_text().split(), 30)
    time.sleep(start_s / 2)
    parent.send_signal(signal.SIGKILL)
    parent.wait(30)
    wait_until(lambda: not is_running(int(pids[0])))


def test_a_package_s_own_folder_among_the_paths_hides_no_module_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # OpenCV puts its folder first, with a `typing` of its own, while another thread imports it.
    for name in ("__init__.py", "typing.py"):
        (tmp_path / name).write_text("raise ImportError('of a package')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_in_child("json:loads", "1") == 1
