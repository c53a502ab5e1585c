"""A model's code touches what is its own: not the daemon, its files, or what others run."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.processes import is_running
from support.waiting import wait_until

from edge_server.backends.python import sandbox
from edge_server.settings import Python

if TYPE_CHECKING:
    from collections.abc import Iterator

Serve = Any
TIMEOUT_S = 30.0

needs_landlock = pytest.mark.skipif(
    not sandbox.landlock_version(), reason="this kernel has no Landlock: files are not closed off"
)
needs_seccomp = pytest.mark.skipif(
    not sandbox.seccomp_offered(), reason="this kernel has no seccomp filters that ask the daemon"
)

# Runs a piece of code, and tells what became of it in a parameter.
TRIES = """
def execute(self, requests):
    try:
        namespace = {"os": os, "signal": signal, "c": self.call}
        exec(requests[0].request_id(), namespace)
        said = str(namespace.get("said", "done"))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    return [y([os.getpid()], parameters={"said": said})]

def call(self, name, *arguments):
    "A system call by its name."
    import ctypes, platform
    from edge_server.backends.python import sandbox as s
    tables = {**s.REFUSED, "clone": s.CLONE}
    tables.update({k: v[0] for k, v in {**s.OF_A_PROCESS, **s.REFUSED_VALUES}.items()})
    number = tables[name][s.ARCHITECTURES[platform.machine()].column]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), name)
"""


def said(served: Any, code: str) -> str:
    return str(served.infer("m", 1, id=code).parameters["said"])


@needs_landlock
def test_secrets_and_other_models_cannot_be_read(serve: Serve, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hunter2")
    served = serve(m=TRIES, other=TRIES)
    refused = "PermissionError: [Errno 13] Permission denied"
    assert said(served, f"said = open({str(secret)!r}).read()").startswith(refused)
    other = tmp_path / "models" / "other" / "1" / "model.py"
    assert said(served, f"said = open({str(other)!r}).read()").startswith(refused)
    assert said(served, f"os.truncate({str(secret)!r}, 0)").startswith("PermissionError")
    assert said(served, f"said = os.listdir({str(tmp_path)!r})").startswith(refused)
    for name in ("environ", "mem", "maps"):
        assert said(served, f"open('/proc/{os.getpid()}/{name}').read(1)").startswith(refused)
    assert said(served, f"os.readlink('/proc/{os.getpid()}/fd/0')").startswith(refused)
    assert secret.read_text() == "hunter2"


@needs_landlock
def test_a_model_reads_its_own_directory_and_writes_to_its_temporary_one(serve: Serve) -> None:
    served = serve(m=TRIES)
    own = "__import__('triton_python_backend_utils').get_model_dir()"
    assert said(served, f"said = len(open({own} + '/model.py').read()) > 0") == "True"
    assert said(served, f"open({own} + '/more.py', 'w')").startswith("PermissionError")
    scratch = said(served, "import tempfile; f = tempfile.mkstemp()[1]; said = os.path.dirname(f)")
    assert Path(scratch).name.startswith("edge-server-model-")
    assert len(list(Path(scratch).iterdir())) == 1
    served.registry.clear()
    assert not Path(scratch).exists()


@needs_landlock
def test_an_error_of_the_sandbox_names_the_remedy(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    served = serve(
        m=f"""
        def initialize(self, args):
            open({str(tmp_path / "weights")!r})
        def execute(self, requests): pass
        """
    )
    assert "[python] readable and writable of the daemon's settings open more" in (
        served.failed[0].reason
    )


@needs_seccomp
def test_owners_and_modes_of_files_stay(serve: Serve, tmp_path: Path) -> None:
    """Landlock leaves them open, of every file that the daemon's user owns."""
    secret = tmp_path / "password"
    secret.touch(0o600)
    before = secret.stat()
    served = serve(m=TRIES)
    for change in ("chmod({}, 0o666)", "chown({}, 1, 1)", "truncate({}, 9)"):
        said(served, "os." + change.format(repr(str(secret))))
    assert said(served, f"os.setxattr({str(secret)!r}, 'user.a', b'')").startswith(
        "PermissionError"
    )
    assert secret.stat() == before
    copies = "import shutil, tempfile; shutil.copy2('/etc/passwd', tempfile.gettempdir())"
    assert said(served, copies) == "done"
    touches = (
        "import pathlib, tempfile; path = pathlib.Path(tempfile.gettempdir()) / 'new'; "
        "path.touch(); path.stat()"
    )
    assert said(served, touches) == "done"


@needs_landlock
def test_the_settings_open_more_and_keep_what_is_private_closed(
    serve_with: Any, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    (data / "keys").mkdir(parents=True)
    (data / "weights").write_text("7")
    (data / "keys" / "key").write_text("secret")
    (tmp_path / "out").mkdir()
    settings = Python(
        readable=(str(data),), writable=(str(tmp_path / "out"),), private=(str(data / "keys"),)
    )
    served = serve_with(settings, m=TRIES)
    assert said(served, f"said = open('{data}/weights').read()") == "7"
    assert "Permission denied" in said(served, f"said = open('{data}/keys/key').read()")
    assert "Permission denied" in said(served, f"said = open('{data}/weights', 'w')")
    assert said(served, f"open('{tmp_path}/out/made', 'w').write('x')") == "done"


@needs_landlock
@pytest.mark.parametrize("opened", [True, False])
def test_files_named_without_a_directory_are_in_the_temporary_one_unless_the_settings_open_another(
    serve_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    served = serve_with(Python(writable=(str(tmp_path),) if opened else ()), m=TRIES)
    assert said(served, "open('frame.png', 'w').write('x')") == "done"
    assert (tmp_path / "frame.png").exists() is opened


def test_without_a_sandbox_a_model_may_what_the_daemon_may(serve_with: Any, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("7")
    served = serve_with(Python(sandbox="off"), m=TRIES)
    assert said(served, f"said = open('{tmp_path}/weights').read()") == "7"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


# Each of them is harmless where it is let through.
OF_OTHERS = (
    "os.kill({pid}, 0)",
    "os.kill(-1, 0)",
    "os.killpg({pid}, 0)",
    "signal.pidfd_send_signal(os.pidfd_open({pid}), 0)",
    "c('tgkill', {pid}, {pid}, 0)",
    "c('tkill', {pid}, 0)",
    "c('rt_sigqueueinfo', {pid}, 0, 0)",
    "import resource; resource.prlimit({pid}, resource.RLIMIT_CORE, (0, 0))",
    "os.sched_setaffinity({pid}, {{0}})",
    "os.setpriority(os.PRIO_PROCESS, {pid}, 0)",
    "os.setpriority(os.PRIO_USER, 0, 0)",
    "import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, {pid})",
    "c('ptrace', 16, {pid}, 0, 0)",
    "c('process_vm_readv', {pid}, 0, 0, 0, 0, 0)",
    "c('unshare', 0x10000000)",
    "c('clone', 0x10000011, 0, 0, 0, 0)",
    "c('clone', 0x00008011, 0, 0, 0, 0)",
    "c('shmget', 0, 4096, 0o600)",
    "c('bpf', 0, 0, 0)",
    "c('keyctl', 0, 0, 0, 0, 0)",
    "c('io_uring_setup', 1, 0)",
)


@needs_seccomp
def test_other_processes_and_the_kernel_cannot_be_touched(
    serve: Serve, bystander: subprocess.Popen[bytes]
) -> None:
    served = serve(m=TRIES)
    for code in OF_OTHERS:
        for pid in (bystander.pid, os.getpid()):
            assert said(served, code.format(pid=pid)).startswith("PermissionError"), code


def test_calls_that_need_a_capability_are_refused_to_root_too(serve: Serve) -> None:
    served = serve(m=TRIES)
    for code in (
        "os.chroot('/')",
        "import socket; socket.sethostname(socket.gethostname())",
        "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
    ):
        assert said(served, code).startswith("PermissionError"), code


@needs_seccomp
def test_threads_of_the_daemon_cannot_be_signalled(serve: Serve) -> None:
    # One that is younger than the model's process: its number says nothing.
    served = serve(m=TRIES)
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(TIMEOUT_S,))
    thread.start()
    try:
        assert said(served, f"os.kill({thread.native_id}, 0)").startswith("PermissionError")
    finally:
        over.set()
        thread.join()


@needs_seccomp
def test_a_model_may_signal_what_it_has_started(serve: Serve) -> None:
    served = serve(m=TRIES)
    started = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    assert said(served, started + "p.terminate(); said = p.wait()") == "-15"
    assert said(served, "os.kill(os.getpid(), 0)") == "done"
    assert said(served, "signal.raise_signal(signal.SIGTERM)") == "done"
    pool = "import multiprocessing as m; pool = m.get_context('fork').Pool(2); "
    assert said(served, pool + "said = pool.map(abs, [-1]); pool.terminate()") == "[1]"


@needs_seccomp
def test_what_leaves_its_session_ends_with_the_model(serve: Serve) -> None:
    served = serve(m=TRIES)
    pid = int(
        said(
            served,
            "import subprocess; "
            "said = subprocess.Popen(['setsid', 'sleep', '600'], start_new_session=True).pid",
        )
    )
    assert is_running(pid)
    served.registry.clear()
    wait_until(lambda: not is_running(pid), TIMEOUT_S)


@needs_seccomp
def test_the_daemons_socket_is_closed_where_the_settings_close_it(
    serve_with: Any, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    tries = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert said(serve_with(Python(unix_sockets=True), m=TRIES), tries) == "done"
        closed = serve_with(Python(unix_sockets=False), m=TRIES)
        assert said(closed, tries).startswith("PermissionError")
        assert said(closed, "import socket; socket.socketpair(); socket.socket()") == "done"


def test_a_whole_sandbox_that_is_required_and_not_there_refuses_the_model(
    serve_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    served = serve_with(Python(sandbox="require"), m=TRIES)
    assert "a whole sandbox is required, and this kernel has no Landlock" in (
        served.failed[0].reason
    )


@pytest.mark.parametrize("missing", ["landlock", "seccomp"])
def test_what_the_kernel_does_not_offer_is_logged_and_the_rest_is_done(
    serve_with: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    missing: str,
) -> None:
    if missing == "landlock":
        monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    else:
        older = min(3, sandbox.landlock_version())
        monkeypatch.setattr(sandbox, "landlock_version", lambda: older)
        monkeypatch.setattr(sandbox, "seccomp_offered", lambda: False)
    rules = sandbox.rules_of(Python())
    served = serve_with(Python(), m=TRIES)
    assert said(served, "said = 1") == "1"
    assert sandbox.lacking(rules)
    for line in sandbox.lacking(rules):
        assert line in caplog.text
    if rules.landlock:
        assert "denied" in said(served, "open('/root/.x', 'w')")


def test_what_computes_runs_in_a_sandbox(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            import threading
            import onnxruntime
            a = np.random.default_rng(0).random((300, 300))
            made = []
            workers = [threading.Thread(target=lambda: made.append(a @ a)) for _ in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 2
            return [y([len(made)], parameters={"ort": onnxruntime.__version__})]
        """
    )
    assert served.values("m", 1) == [4]
