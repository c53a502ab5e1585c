"""Models are delivered by the real command, over a real sshd, and killed at each system call."""

from __future__ import annotations

import getpass
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_server.cli.models.inspection import Inspection
from edge_server.cli.models.push import push, read_model, write_about
from edge_server.repository.transfer.local import LocalRepository, send_tree
from edge_server.repository.transfer.remote import _modules
from edge_server.repository.transfer.tar_stream import TarSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import tritonclient.grpc as triton

    from tests.integration.conftest import Process

PATIENCE_S = 60.0
CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)


def models(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edge_server", "models", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def done(*arguments: str | Path) -> str:
    """What the command prints when all is well."""
    process = models(*arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def make_model(folder: Path, text: str) -> Path:
    directory = folder / "m"
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    (directory / "1" / "weights").write_text(text)
    return directory


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


def test_the_verbs_from_key_to_rollback(repository: Path, tmp_path: Path) -> None:
    key, public = tmp_path / "key", tmp_path / "key.pub"
    done("keygen", "--out", key)
    made = make_model(tmp_path / "made", "old")
    assert ": new\n" in done("push", made, "--to", repository, "--sign", key)
    make_model(tmp_path / "made", "new")
    assert "rollback brings the former one back" in done("push", made, "--to", repository)
    assert done("verify", repository / "m") == "m: is what its manifest says\n"
    unsigned = models("verify", repository / "m", "--key", public)
    assert unsigned.returncode == 1
    assert "manifest.json.sig is missing" in unsigned.stderr
    done("rollback", "m", "--to", repository)
    assert done("verify", repository / "m", "--key", public).endswith("is signed by that key\n")
    (row,) = json.loads(done("list", repository, "--key", public, "--json"))
    assert (row["name"], row["versions"], row["manifest"], row["signature"], row["previous"]) == (
        ("m", [1], "fits", "good", True)
    )
    assert row["digest"][:12] in done("list", repository)
    done("pull", "m", "--from", repository, "--to", tmp_path / "back")
    done("verify", tmp_path / "back" / "m", "--key", public)
    done("sign", made, "--key", key)
    done("verify", made, "--key", public)
    (made / "1/weights").write_text("x")
    changed = models("verify", made)
    assert changed.returncode == 1
    assert changed.stderr == f"edge-server: {made}: 1/weights has 1 bytes, not 3\n"
    done("push", made, "--to", repository, "--version", "1", "--in-place")
    done("verify", made)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["push", "{made}", "--to", "{nowhere}"], 78, "nowhere: the model repository cannot be"),
        (["push", "{nowhere}", "--to", "{repository}"], 78, "nowhere: no such directory"),
        (["push", "{repository}", "--to", "{repository}"], 78, "Could not determine backend"),
        (["push", "{made}", "--to", "host:/m", "--ssh", "false --"], 1, "without reply"),
        (["push", "{made}", "--to", "host:/m", "--ssh", "/no/ssh"], 69, "install OpenSSH's client"),
        (["push", "{made}", "--to", "{repository}", "--version", "01"], 2, "a whole number from 1"),
        (["push", "{made}", "--to", "{repository}", "--sing", "k"], 2, "did you mean --sign?"),
        (["push", "{made}", "--to", "{repository}", "--sign", "{nowhere}"], 78, "cannot be read"),
        (["pull", "n", "--from", "{repository}", "--to", "{nowhere}"], 78, "there is no model 'n'"),
        (["list", "{nowhere}"], 78, "nowhere: the model repository cannot be read"),
        (["verify", "{nowhere}"], 78, "nowhere: no such directory"),
        (["verify", "{made}"], 1, "it has no manifest.json; push it with"),
        (["verify", "{made}", "--key", "{nowhere}"], 78, "nowhere: cannot be read"),
        (["rollback", "m", "--to", "{repository}"], 1, "there is nothing to go back to"),
        (["keygen", "--out", "{made}"], 78, "exists already"),
        (["sign", "{nowhere}", "--key", "{nowhere}"], 78, "cannot be read"),
        (["sing"], 2, "invalid choice: 'sing'"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    repository: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    places = {
        "made": make_model(tmp_path / "made", "1"),
        "nowhere": tmp_path / "nowhere",
        "repository": repository,
    }
    process = models(*(each.format(**places) for each in arguments))
    assert (process.returncode, says in process.stderr) == (code, True), process.stderr
    assert "Traceback" not in process.stderr


def test_a_daemon_serves_what_was_pushed_and_sees_nothing_else(
    repository: Path,
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    for batch in (1, 2):
        made = make_model(tmp_path / "made", "1")
        (made / "config.pbtxt").write_text(f"max_batch_size: {batch} {CONFIG}")
        done("push", made, "--to", repository, "--allow-interface-change")
    # As a push that was interrupted leaves it.
    shutil.copytree(made, repository / ".incoming-m-1")
    process = start("--model-repository", str(repository), "--model-control-mode", "explicit")
    server = client(process)
    for batch in (2, 1):
        server.load_model("m")
        assert server.get_model_config("m").config.max_batch_size == batch
        done("rollback", "m", "--to", repository)
    index = server.get_model_repository_index()
    assert [model.name for model in index.models] == ["m"]


# --- killed at each system call -------------------------------------------------------------------

# Not every machine has those with a question mark.
_CHANGES = (
    "?mkdir,mkdirat,write,utimensat,fsync,?rename,?renameat,renameat2,?unlink,unlinkat,?rmdir,flock"
)
_NO_EXCHANGE = "inject=renameat2:error=EINVAL"


def receiving(repository: Path, model: Path) -> bytes:
    """What the receiving side of a push of `model` reads, once it has its modules: the side that
    changes a repository, the same locally and over ssh."""
    request = {"do": "receive", "name": "m", "all_but": "", "repository": os.fspath(repository)}
    write_about(model, None)
    stream = io.BytesIO()
    stream.write(json.dumps(request).encode() + b"\n")
    sink = TarSink(stream)
    sink.end(send_tree(read_model(model), sink))
    return stream.getvalue()


# As BOOT, but that it loads the modules once for all processes; each begins when it is continued.
_FORKS = """
import json, os, signal, sys, types
for name, text in json.loads(sys.stdin.buffer.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
for line in sys.stdin.buffer:
    request, reply = json.loads(line)
    process = os.fork()
    if process == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        with open(request, "rb") as read, open(reply, "wb") as write:
            os._exit(module.answer(read, write))
    os.waitpid(process, os.WUNTRACED)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class FarSides:
    """Runs the side of a push that receives, each time in a process that strace looks at."""

    def __init__(self, strace: str, folder: Path) -> None:
        self._strace = strace
        self._request, self._reply = folder / "request", folder / "reply"
        command = [sys.executable, "-I", "-S", "-c", _FORKS]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._say(json.dumps(_modules()))

    def receive(self, data: bytes, *injections: str) -> tuple[int, bytes]:
        """How it ended, and what it replied."""
        self._request.write_bytes(data)
        self._reply.write_bytes(b"")
        self._say(json.dumps([str(self._request), str(self._reply)]))
        process = self._hear()
        flags = [flag for each in (f"trace={_CHANGES}", *injections) for flag in ("-e", each)]
        command = [self._strace, "-o", os.devnull, *flags, "-p", str(process)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            assert "attached" in (said := tracer.stderr.readline()), said
            os.kill(process, signal.SIGCONT)
            tracer.communicate(timeout=PATIENCE_S)
        return self._hear(), self._reply.read_bytes()

    def close(self) -> None:
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _hear(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def far_sides(strace: str, in_memory: Callable[[], Path]) -> Iterator[FarSides]:
    started = FarSides(strace, in_memory())
    yield started
    started.close()


def is_whole(repository: Path, name: str) -> bool:
    return Inspection([]).faults(LocalRepository(repository).inventory(name)) == []


@pytest.mark.parametrize(
    ("pushes_before", "exchange"), [(0, True), (1, True), (2, True), (1, False), (2, False)]
)
def test_killed_at_any_system_call_a_push_leaves_no_half_model(
    far_sides: FarSides, in_memory: Callable[[], Path], exchange: bool, pushes_before: int
) -> None:
    repository, folder = in_memory(), in_memory()
    local = LocalRepository(repository)
    texts = ["one", "two"][:pushes_before]
    data = receiving(repository, make_model(folder / "new", "new"))
    killed: Counter[str] = Counter()
    for call in _CHANGES.split(","):
        if call == "renameat2" and not exchange:
            continue
        while True:
            shutil.rmtree(repository)
            repository.mkdir()
            for text in texts:
                push(make_model(folder / "made", text), local)
            kill = f"inject={call}:signal=SIGKILL:when={killed[call] + 1}"
            code, reply = far_sides.receive(data, kill, *([] if exchange else [_NO_EXCHANGE]))
            if code == 0:
                assert (repository / "m/1/weights").read_text() == "new"
                break
            assert code == -signal.SIGKILL, reply
            killed[call] += 1
            is_there = (repository / "m").exists()
            # Only where names cannot be exchanged is there a moment without any.
            assert is_there or not texts or not exchange
            if is_there:
                assert is_whole(repository, "m")
                assert (repository / "m/1/weights").read_text() in {*texts[-1:], "new"}
            assert all(path.name == "m" or path.name[0] == "." for path in repository.iterdir())
            if texts:
                # A second push puts right whatever there was …
                push(make_model(folder / "made", "next"), local)
                assert (repository / "m/1/weights").read_text() == "next"
                assert {path.name for path in repository.iterdir()} == {"m", ".previous-m"}
                # … and what it replaced is a whole model too.
                local.roll_back("m")
                assert is_whole(repository, "m")
                assert (repository / "m/1/weights").read_text() in {"one", "two", "new"}
    # Of each file, each directory and the repository; and the names.
    assert killed["fsync"] == 6
    assert killed["write"] >= 4
    assert killed["?rename"] + killed["?renameat"] + killed["renameat2"] >= min(
        1 + pushes_before, 2
    )


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ("?mkdir,mkdirat:error=ENOSPC", "No space left on device"),
        ("write:error=ENOSPC", "No space left on device"),
        ("fsync:error=EIO", "Input/output error"),
        ("renameat2:error=EROFS", "Read-only file system"),
    ],
)
def test_what_the_file_system_refuses_changes_nothing(
    far_sides: FarSides, repository: Path, tmp_path: Path, refusal: str, says: str
) -> None:
    push(make_model(tmp_path / "made", "old"), LocalRepository(repository))
    data = receiving(repository, make_model(tmp_path / "new", "new"))
    code, reply = far_sides.receive(data, f"inject={refusal}:when=1")
    assert code == 1
    assert f"cannot be written: {says}".encode() in reply
    assert [path.name for path in repository.iterdir()] == ["m"]
    assert (repository / "m/1/weights").read_text() == "old"


@pytest.fixture
def heeding() -> Iterator[None]:
    """Children heed an interrupt, also where a shell runs the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding")
def test_interrupted_from_the_keyboard_it_takes_everything_back(
    repository: Path, tmp_path: Path
) -> None:
    made = make_model(tmp_path / "made", "1")
    with (made / "1" / "large").open("wb") as file:
        file.truncate(4 << 30)
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_server", "models", "push", made, "--to", repository],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not list(repository.glob(".incoming-*/1/large")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (130, "edge-server: interrupted; no half model is left\n")
    assert list(repository.iterdir()) == []


# --- over a real sshd -----------------------------------------------------------------------------


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The ssh command that reaches a real sshd of this user, on the loopback."""
    # sshd wants to be called by its whole path; Debian puts it where only root looks.
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd on this machine: apt install openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    options = {
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "authorized",
        "StrictModes": "no",
        "PidFile": "none",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
    }
    flags = [f"-o{name}={value}" for name, value in options.items()]
    server = subprocess.Popen(
        [sshd, "-D", "-e", "-f", os.devnull, "-p", str(port), *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    said = ""
    for line in server.stderr:
        said += line
        if "listening" in line:
            break
    else:
        server.wait()
        pytest.skip(f"sshd does not start here: {said}")
    command = f"ssh -q -p {port} -i {tmp_path / 'user'} -l {getpass.getuser()} -o BatchMode=yes"
    command += " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -F none"
    tried = subprocess.run(
        [*command.split(), "127.0.0.1", "python3 -c ''"], capture_output=True, check=False
    )
    try:
        if tried.returncode:
            pytest.skip(f"sshd lets nobody in here: {tried.stderr.decode()}")
        yield command
    finally:
        server.terminate()
        server.communicate()


def test_over_ssh_it_is_the_same(ssh: str, repository: Path, tmp_path: Path) -> None:
    there = f"127.0.0.1:{repository}"
    made = make_model(tmp_path / "made", "old")
    (made / "1" / "large").write_bytes(os.urandom(20 << 20))
    (made / "1" / "a 'name' $HOME").write_text("x")
    assert ": new\n" in done("push", made, "--to", there, "--ssh", ssh)
    make_model(tmp_path / "made", "new")
    assert "replaced" in done("push", made, "--to", there, "--ssh", ssh)
    assert "nothing changed" in done("push", made, "--to", there, "--ssh", ssh)
    done("verify", repository / "m")
    assert (repository / "m/1/weights").read_text() == "new"
    done("rollback", "m", "--to", there, "--ssh", ssh)
    assert (repository / "m/1/weights").read_text() == "old"
    done("pull", "m", "--from", there, "--to", tmp_path / "back", "--ssh", ssh)
    for path in ("1/large", "1/weights", "1/a 'name' $HOME"):
        assert (tmp_path / "back/m" / path).read_bytes() == (repository / "m" / path).read_bytes()
    (row,) = json.loads(done("list", there, "--json", "--ssh", ssh))
    assert (row["name"], row["manifest"], row["previous"]) == ("m", "fits", True)
    (made / "2").mkdir()
    (made / "2" / "weights").write_text("two")
    done("push", made, "--to", there, "--ssh", ssh, "--version", "2")
    assert (repository / "m/1/weights").read_text() == "old"
    assert is_whole(repository, "m")
    away = models("list", "127.0.0.1:/nowhere", "--ssh", ssh)
    assert (away.returncode, "the model repository cannot be read" in away.stderr) == (78, True)


def test_an_sshd_that_is_not_there_or_lets_nobody_in_is_unavailable(
    ssh: str, repository: Path, tmp_path: Path
) -> None:
    there = f"127.0.0.1:{repository}"
    for wrong in (ssh.replace("-p ", "-p 1 -o Port="), ssh.replace("/user", "/nowhere")):
        process = models("list", there, "--ssh", wrong)
        assert process.returncode == 69
        assert "127.0.0.1: ssh could not connect, or was not let in" in process.stderr
